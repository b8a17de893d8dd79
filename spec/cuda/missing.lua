-- Ops that have no kernel for cuda devices yet, by name.
local missing = {}
for name in ([[
  attention attention_backward conv2d conv2d_act conv2d_input conv2d_weight conv2d_weight_bias drop_attention
  drop_attention_backward fused linear_act linear_cross_entropy plain_attention plain_attention_backward
]]):gmatch '%S+' do missing[name] = true end
return missing

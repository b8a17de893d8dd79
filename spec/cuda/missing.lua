-- Ops that have no kernel for cuda devices yet, by name.
local missing = {}
for name in ([[
  adagrad_rows_ adam_rows_ adaptive_avg_pool2d adaptive_avg_pool2d_backward attention attention_backward
  avg_pool2d avg_pool2d_backward batch_norm batch_norm_act batch_norm_act_backward batch_norm_again batch_norm_backward
  conv2d
  conv2d_act conv2d_input conv2d_weight conv2d_weight_bias cumprod cumprod_backward cumsum drop_attention
  drop_attention_backward fused linear_act linear_cross_entropy masked_scatter masked_select
  masked_select_backward max_dim max_pool2d max_pool2d_backward max_pool2d_pick merge_ids merge_ids_padded
  micro_last micro_mean micro_pack min_dim multinomial nonzero pad_backward plain_attention
  plain_attention_backward randperm sgd_rows_ sort strided_add topk
]]):gmatch '%S+' do missing[name] = true end
return missing

-- Ops that have no kernel for cuda devices yet, by name.
local missing = {}
for name in ([[
  adadelta_ adagrad_ adagrad_rows_ adam_ adam_rows_ adamax_ adaptive_avg_pool2d adaptive_avg_pool2d_backward
  addmm attention attention_backward avg_pool2d avg_pool2d_backward batch_norm batch_norm_act
  batch_norm_act_backward batch_norm_backward bce_logits_loss bce_logits_loss_backward bce_loss
  bce_loss_backward bmm conv2d conv2d_act conv2d_input conv2d_weight conv2d_weight_bias cross_entropy
  cross_entropy_backward cumprod cumprod_backward cumsum diagonal_backward drop_attention
  drop_attention_backward fused huber_loss huber_loss_backward kl_loss kl_loss_backward l1_loss
  l1_loss_backward linear linear_act linear_cross_entropy linear_weight masked_scatter masked_select
  masked_select_backward matmul max_dim max_pool2d max_pool2d_backward max_pool2d_pick merge_ids
  merge_ids_padded micro_last micro_mean micro_pack min_dim mse_loss mse_loss_backward multinomial nonzero pad
  pad_backward plain_attention plain_attention_backward randperm rmsprop_ scale_all_ sgd_ sgd_rows_
  slice_backward smooth_l1_loss smooth_l1_loss_backward sort strided_add topk total_norm zero_all_
]]):gmatch '%S+' do missing[name] = true end
return missing

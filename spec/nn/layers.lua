return {
  { name = [==[linear]==], lua = [==[nn.Linear(3, 4)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Linear(in_features=3, out_features=4, bias=True)]==] },
  { name = [==[linear-no-bias]==], lua = [==[nn.Linear(3, 4, {bias = false})]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Linear(in_features=3, out_features=4, bias=False)]==] },
  { name = [==[conv2d]==], lua = [==[nn.Conv2d(2, 4, 3)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Conv2d(2, 4, kernel_size=(3, 3), stride=(1, 1))]==] },
  { name = [==[conv2d-positional]==], lua = [==[nn.Conv2d(4, 6, {3, 2}, {2, 1}, {1, 0}, 1, 2, false)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Conv2d(4, 6, kernel_size=(3, 2), stride=(2, 1), padding=(1, 0), groups=2, bias=False)]==] },
  { name = [==[conv2d-same]==], lua = [==[nn.Conv2d(2, 3, {4, 3}, {padding = 'same', dilation = {1, 2}})]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Conv2d(2, 3, kernel_size=(4, 3), stride=(1, 1), padding=same, dilation=(1, 2))]==] },
  { name = [==[conv2d-valid]==], lua = [==[nn.Conv2d(2, 3, 2, {padding = 'valid', stride = 2})]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Conv2d(2, 3, kernel_size=(2, 2), stride=(2, 2), padding=valid)]==] },
  { name = [==[conv2d-reflect]==], lua = [==[nn.Conv2d(2, 2, 3, {padding = {1, 2}, padding_mode = 'reflect', stride = {1, 2}})]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Conv2d(2, 2, kernel_size=(3, 3), stride=(1, 2), padding=(1, 2), padding_mode=reflect)]==] },
  { name = [==[conv2d-replicate]==], lua = [==[nn.Conv2d(2, 2, 3, {padding = {1, 2}, padding_mode = 'replicate', stride = {1, 2}})]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Conv2d(2, 2, kernel_size=(3, 3), stride=(1, 2), padding=(1, 2), padding_mode=replicate)]==] },
  { name = [==[conv2d-circular]==], lua = [==[nn.Conv2d(2, 2, 3, {padding = {1, 2}, padding_mode = 'circular', stride = {1, 2}})]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Conv2d(2, 2, kernel_size=(3, 3), stride=(1, 2), padding=(1, 2), padding_mode=circular)]==] },
  { name = [==[conv2d-depthwise]==], lua = [==[nn.Conv2d(4, 8, 3, {groups = 4, padding = 1})]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Conv2d(4, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), groups=4)]==] },
  { name = [==[max_pool2d]==], lua = [==[nn.MaxPool2d(3, {stride = 2, padding = 1})]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[MaxPool2d(kernel_size=3, stride=2, padding=1, dilation=1, ceil_mode=False)]==] },
  { name = [==[max_pool2d-more]==], lua = [==[nn.MaxPool2d(2, {dilation = 2, ceil_mode = true})]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[MaxPool2d(kernel_size=2, stride=2, padding=0, dilation=2, ceil_mode=True)]==] },
  { name = [==[avg_pool2d]==], lua = [==[nn.AvgPool2d(2)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[AvgPool2d(kernel_size=2, stride=2, padding=0)]==] },
  { name = [==[avg_pool2d-more]==], lua = [==[nn.AvgPool2d({3, 2}, {stride = 2, padding = 1, ceil_mode = true, count_include_pad = false})]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[AvgPool2d(kernel_size=(3, 2), stride=2, padding=1)]==] },
  { name = [==[adaptive]==], lua = [==[nn.AdaptiveAvgPool2d({3, 2})]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[AdaptiveAvgPool2d(output_size=(3, 2))]==] },
  { name = [==[adaptive-1]==], lua = [==[nn.AdaptiveAvgPool2d(1)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[AdaptiveAvgPool2d(output_size=1)]==] },
  { name = [==[batch_norm1d-2]==], lua = [==[nn.BatchNorm1d(3)]==], inputs = 1, outs = 1, calls = 3, eval = false, options = [==[]==], named = {  },
    text = [==[BatchNorm1d(3, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)]==] },
  { name = [==[batch_norm1d-2-eval]==], lua = [==[nn.BatchNorm1d(3)]==], inputs = 1, outs = 1, calls = 1, eval = true, options = [==[]==], named = {  },
    text = [==[BatchNorm1d(3, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)]==] },
  { name = [==[batch_norm1d-3]==], lua = [==[nn.BatchNorm1d(3)]==], inputs = 1, outs = 1, calls = 3, eval = false, options = [==[]==], named = {  },
    text = [==[BatchNorm1d(3, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)]==] },
  { name = [==[batch_norm1d-3-eval]==], lua = [==[nn.BatchNorm1d(3)]==], inputs = 1, outs = 1, calls = 1, eval = true, options = [==[]==], named = {  },
    text = [==[BatchNorm1d(3, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)]==] },
  { name = [==[batch_norm2d-4]==], lua = [==[nn.BatchNorm2d(3)]==], inputs = 1, outs = 1, calls = 3, eval = false, options = [==[]==], named = {  },
    text = [==[BatchNorm2d(3, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)]==] },
  { name = [==[batch_norm2d-4-eval]==], lua = [==[nn.BatchNorm2d(3)]==], inputs = 1, outs = 1, calls = 1, eval = true, options = [==[]==], named = {  },
    text = [==[BatchNorm2d(3, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)]==] },
  { name = [==[batch_norm3d-5]==], lua = [==[nn.BatchNorm3d(3)]==], inputs = 1, outs = 1, calls = 3, eval = false, options = [==[]==], named = {  },
    text = [==[BatchNorm3d(3, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)]==] },
  { name = [==[batch_norm3d-5-eval]==], lua = [==[nn.BatchNorm3d(3)]==], inputs = 1, outs = 1, calls = 1, eval = true, options = [==[]==], named = {  },
    text = [==[BatchNorm3d(3, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)]==] },
  { name = [==[batch_norm-options]==], lua = [==[nn.BatchNorm2d(3, {eps = 0.1, momentum = 0.3})]==], inputs = 1, outs = 1, calls = 2, eval = false, options = [==[]==], named = {  },
    text = [==[BatchNorm2d(3, eps=0.1, momentum=0.3, affine=True, bias=True, track_running_stats=True)]==] },
  { name = [==[batch_norm-average]==], lua = [==[nn.BatchNorm2d(3, {momentum = false})]==], inputs = 1, outs = 1, calls = 4, eval = false, options = [==[]==], named = {  },
    text = [==[BatchNorm2d(3, eps=1e-05, momentum=None, affine=True, bias=True, track_running_stats=True)]==] },
  { name = [==[batch_norm-plain]==], lua = [==[nn.BatchNorm2d(3, {affine = false, track_running_stats = false})]==], inputs = 1, outs = 1, calls = 1, eval = true, options = [==[]==], named = {  },
    text = [==[BatchNorm2d(3, eps=1e-05, momentum=0.1, affine=False, bias=False, track_running_stats=False)]==] },
  { name = [==[layer_norm]==], lua = [==[nn.LayerNorm({3, 4})]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[LayerNorm((3, 4), eps=1e-05, elementwise_affine=True, bias=True)]==] },
  { name = [==[layer_norm-number]==], lua = [==[nn.LayerNorm(4, {eps = 0.1, bias = false})]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[LayerNorm((4,), eps=0.1, elementwise_affine=True, bias=False)]==] },
  { name = [==[layer_norm-plain]==], lua = [==[nn.LayerNorm(4, {elementwise_affine = false})]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[LayerNorm((4,), eps=1e-05, elementwise_affine=False, bias=False)]==] },
  { name = [==[group_norm]==], lua = [==[nn.GroupNorm(2, 6)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[GroupNorm(2, 6, eps=1e-05, affine=True, bias=True)]==] },
  { name = [==[group_norm-options]==], lua = [==[nn.GroupNorm(3, 6, 0.01, false)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[GroupNorm(3, 6, eps=0.01, affine=False, bias=False)]==] },
  { name = [==[rms_norm]==], lua = [==[nn.RMSNorm(4)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[RMSNorm((4,), eps=None, elementwise_affine=True)]==] },
  { name = [==[rms_norm-eps]==], lua = [==[nn.RMSNorm({2, 4}, {eps = 0.1})]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[RMSNorm((2, 4), eps=0.1, elementwise_affine=True)]==] },
  { name = [==[dropout-eval]==], lua = [==[nn.Dropout(0.5)]==], inputs = 1, outs = 1, calls = 1, eval = true, options = [==[]==], named = {  },
    text = [==[Dropout(p=0.5, inplace=False)]==] },
  { name = [==[embedding]==], lua = [==[nn.Embedding(5, 3)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Embedding(5, 3)]==] },
  { name = [==[embedding-padding]==], lua = [==[nn.Embedding(5, 3, {padding_idx = -2})]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Embedding(5, 3, padding_idx=3)]==] },
  { name = [==[embedding-sparse]==], lua = [==[nn.Embedding(5, 3, {sparse = true})]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Embedding(5, 3, sparse=True)]==] },
  { name = [==[flatten]==], lua = [==[nn.Flatten()]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Flatten(start_dim=1, end_dim=-1)]==] },
  { name = [==[flatten-dims]==], lua = [==[nn.Flatten(0, 1)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Flatten(start_dim=0, end_dim=1)]==] },
  { name = [==[identity]==], lua = [==[nn.Identity()]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Identity()]==] },
  { name = [==[sequential]==], lua = [==[nn.Sequential(nn.Linear(3, 4), nn.GELU('tanh'), nn.Linear(4, 2))]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Sequential(
  (0): Linear(in_features=3, out_features=4, bias=True)
  (1): GELU(approximate='tanh')
  (2): Linear(in_features=4, out_features=2, bias=True)
)]==] },
  { name = [==[activation ReLU()]==], lua = [==[nn.ReLU()]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[ReLU()]==] },
  { name = [==[activation ReLU6()]==], lua = [==[nn.ReLU6()]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[ReLU6()]==] },
  { name = [==[activation Sigmoid()]==], lua = [==[nn.Sigmoid()]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Sigmoid()]==] },
  { name = [==[activation Tanh()]==], lua = [==[nn.Tanh()]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Tanh()]==] },
  { name = [==[activation SiLU()]==], lua = [==[nn.SiLU()]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[SiLU()]==] },
  { name = [==[activation Mish()]==], lua = [==[nn.Mish()]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Mish()]==] },
  { name = [==[activation Softsign()]==], lua = [==[nn.Softsign()]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Softsign()]==] },
  { name = [==[activation Hardswish()]==], lua = [==[nn.Hardswish()]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Hardswish()]==] },
  { name = [==[activation Hardsigmoid()]==], lua = [==[nn.Hardsigmoid()]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Hardsigmoid()]==] },
  { name = [==[activation LogSigmoid()]==], lua = [==[nn.LogSigmoid()]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[LogSigmoid()]==] },
  { name = [==[activation SELU()]==], lua = [==[nn.SELU()]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[SELU()]==] },
  { name = [==[activation Tanhshrink()]==], lua = [==[nn.Tanhshrink()]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Tanhshrink()]==] },
  { name = [==[activation ELU(0.7)]==], lua = [==[nn.ELU(0.7)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[ELU(alpha=0.7)]==] },
  { name = [==[activation CELU(0.7)]==], lua = [==[nn.CELU(0.7)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[CELU(alpha=0.7)]==] },
  { name = [==[activation GELU()]==], lua = [==[nn.GELU()]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[GELU(approximate='none')]==] },
  { name = [==[activation GELU({approximate = 'tanh'})]==], lua = [==[nn.GELU({approximate = 'tanh'})]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[GELU(approximate='tanh')]==] },
  { name = [==[activation LeakyReLU(0.2)]==], lua = [==[nn.LeakyReLU(0.2)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[LeakyReLU(negative_slope=0.2)]==] },
  { name = [==[activation Softplus(2, 1)]==], lua = [==[nn.Softplus(2, 1)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Softplus(beta=2, threshold=1)]==] },
  { name = [==[activation Softshrink(0.3)]==], lua = [==[nn.Softshrink(0.3)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Softshrink(0.3)]==] },
  { name = [==[activation Hardshrink(0.3)]==], lua = [==[nn.Hardshrink(0.3)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Hardshrink(0.3)]==] },
  { name = [==[activation Hardtanh(-0.5, 0.7)]==], lua = [==[nn.Hardtanh(-0.5, 0.7)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Hardtanh(min_val=-0.5, max_val=0.7)]==] },
  { name = [==[activation Threshold(0.1, 20)]==], lua = [==[nn.Threshold(0.1, 20)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Threshold(threshold=0.1, value=20)]==] },
  { name = [==[activation Softmax(1)]==], lua = [==[nn.Softmax(1)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Softmax(dim=1)]==] },
  { name = [==[activation Softmax(0)]==], lua = [==[nn.Softmax(0)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Softmax(dim=0)]==] },
  { name = [==[activation LogSoftmax(1)]==], lua = [==[nn.LogSoftmax(1)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[LogSoftmax(dim=1)]==] },
  { name = [==[activation GLU(1)]==], lua = [==[nn.GLU(1)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[GLU(dim=1)]==] },
  { name = [==[activation PReLU()]==], lua = [==[nn.PReLU()]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[PReLU(num_parameters=1)]==] },
  { name = [==[activation PReLU(4)]==], lua = [==[nn.PReLU(4)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[PReLU(num_parameters=4)]==] },
  { name = [==[activation Softmin(1)]==], lua = [==[nn.Softmin(1)]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[Softmin(dim=1)]==] },
  { name = [==[mha]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = false})]==], inputs = 3, outs = 2, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-first]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = true})]==], inputs = 3, outs = 2, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-no-weights]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = false})]==], inputs = 3, outs = 1, calls = 1, eval = false, options = [==[need_weights = false]==], named = {  },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-no-weights-first]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = true})]==], inputs = 3, outs = 1, calls = 1, eval = false, options = [==[need_weights = false]==], named = {  },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-each-head]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = false})]==], inputs = 3, outs = 2, calls = 1, eval = false, options = [==[average_attn_weights = false]==], named = {  },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-each-head-first]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = true})]==], inputs = 3, outs = 2, calls = 1, eval = false, options = [==[average_attn_weights = false]==], named = {  },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-no-bias]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = false, bias = false})]==], inputs = 3, outs = 2, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=False)
)]==] },
  { name = [==[mha-no-bias-first]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = true, bias = false})]==], inputs = 3, outs = 2, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=False)
)]==] },
  { name = [==[mha-mask]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = false})]==], inputs = 3, outs = 2, calls = 1, eval = false, options = [==[]==], named = { 'attn_mask' },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-mask-first]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = true})]==], inputs = 3, outs = 2, calls = 1, eval = false, options = [==[]==], named = { 'attn_mask' },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-mask-no-weights]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = false})]==], inputs = 3, outs = 1, calls = 1, eval = false, options = [==[need_weights = false]==], named = { 'attn_mask' },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-mask-no-weights-first]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = true})]==], inputs = 3, outs = 1, calls = 1, eval = false, options = [==[need_weights = false]==], named = { 'attn_mask' },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-float-mask]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = false})]==], inputs = 3, outs = 2, calls = 1, eval = false, options = [==[]==], named = { 'attn_mask' },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-float-mask-first]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = true})]==], inputs = 3, outs = 2, calls = 1, eval = false, options = [==[]==], named = { 'attn_mask' },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-mask-3d]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = false})]==], inputs = 3, outs = 1, calls = 1, eval = false, options = [==[need_weights = false]==], named = { 'attn_mask' },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-mask-3d-first]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = true})]==], inputs = 3, outs = 1, calls = 1, eval = false, options = [==[need_weights = false]==], named = { 'attn_mask' },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-padding]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = false})]==], inputs = 3, outs = 2, calls = 1, eval = false, options = [==[]==], named = { 'key_padding_mask' },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-padding-first]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = true})]==], inputs = 3, outs = 2, calls = 1, eval = false, options = [==[]==], named = { 'key_padding_mask' },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-both]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = false})]==], inputs = 3, outs = 2, calls = 1, eval = false, options = [==[]==], named = { 'key_padding_mask', 'attn_mask' },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-both-first]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = true})]==], inputs = 3, outs = 2, calls = 1, eval = false, options = [==[]==], named = { 'key_padding_mask', 'attn_mask' },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-causal]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = false})]==], inputs = 3, outs = 1, calls = 1, eval = false, options = [==[need_weights = false, is_causal = true]==], named = { 'attn_mask' },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-causal-first]==], lua = [==[nn.MultiheadAttention(6, 2, {batch_first = true})]==], inputs = 3, outs = 1, calls = 1, eval = false, options = [==[need_weights = false, is_causal = true]==], named = { 'attn_mask' },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-cross]==], lua = [==[nn.MultiheadAttention(6, 2, {kdim = 5, vdim = 3, batch_first = true})]==], inputs = 3, outs = 2, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[mha-unbatched]==], lua = [==[nn.MultiheadAttention(6, 2)]==], inputs = 3, outs = 2, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[MultiheadAttention(
  (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
)]==] },
  { name = [==[encoder-False]==], lua = [==[nn.TransformerEncoderLayer(6, 2, {dim_feedforward = 8, dropout = 0, activation = 'gelu', batch_first = true, norm_first = false})]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = { 'src_mask', 'src_key_padding_mask' },
    text = [==[TransformerEncoderLayer(
  (self_attn): MultiheadAttention(
    (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
  )
  (linear1): Linear(in_features=6, out_features=8, bias=True)
  (dropout): Dropout(p=0.0, inplace=False)
  (linear2): Linear(in_features=8, out_features=6, bias=True)
  (norm1): LayerNorm((6,), eps=1e-05, elementwise_affine=True, bias=True)
  (norm2): LayerNorm((6,), eps=1e-05, elementwise_affine=True, bias=True)
  (dropout1): Dropout(p=0.0, inplace=False)
  (dropout2): Dropout(p=0.0, inplace=False)
)]==] },
  { name = [==[encoder-True]==], lua = [==[nn.TransformerEncoderLayer(6, 2, {dim_feedforward = 8, dropout = 0, activation = 'gelu', batch_first = true, norm_first = true})]==], inputs = 1, outs = 1, calls = 1, eval = false, options = [==[]==], named = { 'src_mask', 'src_key_padding_mask' },
    text = [==[TransformerEncoderLayer(
  (self_attn): MultiheadAttention(
    (out_proj): NonDynamicallyQuantizableLinear(in_features=6, out_features=6, bias=True)
  )
  (linear1): Linear(in_features=6, out_features=8, bias=True)
  (dropout): Dropout(p=0.0, inplace=False)
  (linear2): Linear(in_features=8, out_features=6, bias=True)
  (norm1): LayerNorm((6,), eps=1e-05, elementwise_affine=True, bias=True)
  (norm2): LayerNorm((6,), eps=1e-05, elementwise_affine=True, bias=True)
  (dropout1): Dropout(p=0.0, inplace=False)
  (dropout2): Dropout(p=0.0, inplace=False)
)]==] },
  { name = [==[cross_entropy-mean]==], lua = [==[nn.CrossEntropyLoss {reduction = 'mean'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[CrossEntropyLoss()]==] },
  { name = [==[cross_entropy-sum]==], lua = [==[nn.CrossEntropyLoss {reduction = 'sum'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[CrossEntropyLoss()]==] },
  { name = [==[cross_entropy-none]==], lua = [==[nn.CrossEntropyLoss {reduction = 'none'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[CrossEntropyLoss()]==] },
  { name = [==[cross_entropy-weight-mean]==], lua = [==[nn.CrossEntropyLoss {weight = tensors.w5, ignore_index = 1, label_smoothing = 0.1, reduction = 'mean'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[CrossEntropyLoss()]==] },
  { name = [==[cross_entropy-weight-sum]==], lua = [==[nn.CrossEntropyLoss {weight = tensors.w5, ignore_index = 1, label_smoothing = 0.1, reduction = 'sum'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[CrossEntropyLoss()]==] },
  { name = [==[cross_entropy-weight-none]==], lua = [==[nn.CrossEntropyLoss {weight = tensors.w5, ignore_index = 1, label_smoothing = 0.1, reduction = 'none'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[CrossEntropyLoss()]==] },
  { name = [==[cross_entropy-soft-mean]==], lua = [==[nn.CrossEntropyLoss {weight = tensors.w5, label_smoothing = 0.2, reduction = 'mean'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[CrossEntropyLoss()]==] },
  { name = [==[cross_entropy-soft-sum]==], lua = [==[nn.CrossEntropyLoss {weight = tensors.w5, label_smoothing = 0.2, reduction = 'sum'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[CrossEntropyLoss()]==] },
  { name = [==[cross_entropy-soft-none]==], lua = [==[nn.CrossEntropyLoss {weight = tensors.w5, label_smoothing = 0.2, reduction = 'none'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[CrossEntropyLoss()]==] },
  { name = [==[nll-mean]==], lua = [==[nn.NLLLoss {weight = tensors.w5, ignore_index = 2, reduction = 'mean'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[NLLLoss()]==] },
  { name = [==[nll-sum]==], lua = [==[nn.NLLLoss {weight = tensors.w5, ignore_index = 2, reduction = 'sum'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[NLLLoss()]==] },
  { name = [==[nll-none]==], lua = [==[nn.NLLLoss {weight = tensors.w5, ignore_index = 2, reduction = 'none'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[NLLLoss()]==] },
  { name = [==[nll-2d-mean]==], lua = [==[nn.NLLLoss {reduction = 'mean'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[NLLLoss()]==] },
  { name = [==[nll-2d-sum]==], lua = [==[nn.NLLLoss {reduction = 'sum'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[NLLLoss()]==] },
  { name = [==[nll-2d-none]==], lua = [==[nn.NLLLoss {reduction = 'none'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[NLLLoss()]==] },
  { name = [==[mse-mean]==], lua = [==[nn.MSELoss {reduction = 'mean'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[MSELoss()]==] },
  { name = [==[mse-sum]==], lua = [==[nn.MSELoss {reduction = 'sum'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[MSELoss()]==] },
  { name = [==[mse-none]==], lua = [==[nn.MSELoss {reduction = 'none'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[MSELoss()]==] },
  { name = [==[l1-mean]==], lua = [==[nn.L1Loss {reduction = 'mean'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[L1Loss()]==] },
  { name = [==[l1-sum]==], lua = [==[nn.L1Loss {reduction = 'sum'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[L1Loss()]==] },
  { name = [==[l1-none]==], lua = [==[nn.L1Loss {reduction = 'none'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[L1Loss()]==] },
  { name = [==[smooth_l1-mean]==], lua = [==[nn.SmoothL1Loss {beta = 0.5, reduction = 'mean'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[SmoothL1Loss()]==] },
  { name = [==[smooth_l1-sum]==], lua = [==[nn.SmoothL1Loss {beta = 0.5, reduction = 'sum'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[SmoothL1Loss()]==] },
  { name = [==[smooth_l1-none]==], lua = [==[nn.SmoothL1Loss {beta = 0.5, reduction = 'none'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[SmoothL1Loss()]==] },
  { name = [==[huber-mean]==], lua = [==[nn.HuberLoss {delta = 0.5, reduction = 'mean'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[HuberLoss()]==] },
  { name = [==[huber-sum]==], lua = [==[nn.HuberLoss {delta = 0.5, reduction = 'sum'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[HuberLoss()]==] },
  { name = [==[huber-none]==], lua = [==[nn.HuberLoss {delta = 0.5, reduction = 'none'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[HuberLoss()]==] },
  { name = [==[bce-mean]==], lua = [==[nn.BCELoss {weight = tensors.w4, reduction = 'mean'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[BCELoss()]==] },
  { name = [==[bce-sum]==], lua = [==[nn.BCELoss {weight = tensors.w4, reduction = 'sum'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[BCELoss()]==] },
  { name = [==[bce-none]==], lua = [==[nn.BCELoss {weight = tensors.w4, reduction = 'none'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[BCELoss()]==] },
  { name = [==[bce_logits-mean]==], lua = [==[nn.BCEWithLogitsLoss {weight = tensors.w4, pos_weight = tensors.w4, reduction = 'mean'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[BCEWithLogitsLoss()]==] },
  { name = [==[bce_logits-sum]==], lua = [==[nn.BCEWithLogitsLoss {weight = tensors.w4, pos_weight = tensors.w4, reduction = 'sum'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[BCEWithLogitsLoss()]==] },
  { name = [==[bce_logits-none]==], lua = [==[nn.BCEWithLogitsLoss {weight = tensors.w4, pos_weight = tensors.w4, reduction = 'none'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[BCEWithLogitsLoss()]==] },
  { name = [==[kl_div-mean]==], lua = [==[nn.KLDivLoss {reduction = 'mean'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[KLDivLoss()]==] },
  { name = [==[kl_div-sum]==], lua = [==[nn.KLDivLoss {reduction = 'sum'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[KLDivLoss()]==] },
  { name = [==[kl_div-none]==], lua = [==[nn.KLDivLoss {reduction = 'none'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[KLDivLoss()]==] },
  { name = [==[kl_div-log-mean]==], lua = [==[nn.KLDivLoss {log_target = true, reduction = 'mean'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[KLDivLoss()]==] },
  { name = [==[kl_div-log-sum]==], lua = [==[nn.KLDivLoss {log_target = true, reduction = 'sum'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[KLDivLoss()]==] },
  { name = [==[kl_div-log-none]==], lua = [==[nn.KLDivLoss {log_target = true, reduction = 'none'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[KLDivLoss()]==] },
  { name = [==[kl_div-batchmean]==], lua = [==[nn.KLDivLoss {reduction = 'batchmean'}]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[KLDivLoss()]==] },
  { name = [==[cosine]==], lua = [==[nn.CosineSimilarity(1, 0.1)]==], inputs = 2, outs = 1, calls = 1, eval = false, options = [==[]==], named = {  },
    text = [==[CosineSimilarity()]==] },
}

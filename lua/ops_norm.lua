-- batch_norm without the statistics that its op keeps for the gradient.
local mf = require 'moonflow.core'

-- mf.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps), the last three also as options.
function mf.batch_norm(...)
  return (mf._batch_norm(...))
end
mf.Tensor.batch_norm = mf.batch_norm

return mf

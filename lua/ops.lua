-- Composed ops: functions of the module, and methods of tensors, written with ops.
local mf = require 'moonflow.core'
return mf

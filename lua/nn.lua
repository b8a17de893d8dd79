-- Layers, containers, losses, initialisation: the parts of nn. Names, arguments, defaults and
-- initial values are PyTorch's.
local mf = require 'moonflow.core'
local nn = require 'moonflow.nn_module'

nn.init = require 'moonflow.nn_init'
nn.utils = require 'moonflow.nn_utils'
require 'moonflow.nn_layers'
require 'moonflow.nn_conv'
require 'moonflow.nn_recurrent'
require 'moonflow.nn_functions'
require 'moonflow.nn_attention'
require 'moonflow.nn_pad'
require 'moonflow.nn_lazy'
require 'moonflow.nn_graph'
nn.parallel = require 'moonflow.nn_parallel'
-- As in PyTorch, `local F = nn.functional`: the functions of mf.
nn.functional = setmetatable({}, { __index = mf })
return nn

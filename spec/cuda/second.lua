-- The name of a second device, for what needs two; nil where there is one alone.
local mf = require 'moonflow'
return pcall(mf.ones, 1, { device = 'cuda:1' }) and 'cuda:1' or nil

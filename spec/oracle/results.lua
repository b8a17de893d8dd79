-- moonflow spec/oracle/results.lua FILE: what every op gives for its cases, as FILE; for spec/isa_spec.lua.
local mf = require 'moonflow'
local Cases = require 'spec.oracle.cases'
local Run = require 'spec.oracle.run'
local exempt = require 'spec.oracle.exempt'

local all = {}
for _, dtype in ipairs { 'float32', 'float64' } do
  for _, op in ipairs(Run.ops) do
    if not exempt.undefined[op.name] then
      for k, args in ipairs(Cases.list(op, { dtype = mf[dtype], L = 37 })) do
        for i, t in ipairs(Run.call(op, args)) do
          all[('%s %s, case %d, result %d'):format(op.name, dtype, k, i)] = t:contiguous()
        end
      end
    end
  end
end
mf.save(all, arg[1])

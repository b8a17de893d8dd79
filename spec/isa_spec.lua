-- The same calls under each instruction set that the machine has (MF_ISA): floats equal but for
-- rounding, whole numbers and bool exactly.
local mf = require 'moonflow'
local Values = require 'spec.oracle.values'

local function program()
  local i = 0
  while arg[i - 1] do i = i - 1 end
  return arg[i]
end

local function results(isa)
  local file = os.tmpname() .. '.safetensors'
  local command = ('MF_ISA=%s %s spec/oracle/results.lua %s 2>&1'):format(isa, program(), file)
  local pipe = io.popen(command)
  local text = pipe:read '*a'
  pipe:close()
  assert.are.equal('', text)
  local all = mf.load(file)
  os.remove(file)
  return all
end

describe('instruction sets #long', function()
  local base
  for _, isa in ipairs { 'v3', 'v4' } do -- where the CPU lacks one, the next lower one is taken
    it(isa .. ' computes as v2', function()
      base = base or results 'v2'
      local count, wrong = 0, {}
      for name, t in pairs(results(isa)) do
        local want = assert(base[name], name)
        local tolerance = not t:is_floating_point() and 0 or tostring(t.dtype) == 'float64' and 1e-11 or 2e-5
        local how = Values.difference(t, want, tolerance, tolerance)
        if how then wrong[#wrong + 1] = name .. ': ' .. how end
        count = count + 1
      end
      table.sort(wrong)
      assert.are.equal('', table.concat(wrong, '\n'))
      assert.is_true(count > 500)
    end)
  end
end)

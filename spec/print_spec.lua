-- Tensors print as PyTorch prints them; the texts are PyTorch's (goldens/print.py).
local mf = require 'moonflow'

describe('tostring', function()
  after_each(function() mf.set_printoptions { profile = 'default' } end)

  for i, case in ipairs(dofile 'spec/goldens/print.lua') do
    local lua, want, o = case[1], case[2], case[3]
    it(('%d: %s'):format(i, lua), function()
      if o then mf.set_printoptions(o) end
      local t = assert(loadstring('local mf = ...; return ' .. lua))(mf)
      assert.are.equal(want, tostring(t))
    end)
  end

  it('of tensors that are gone says so', function()
    local x = mf.zeros(3)
    x:free()
    assert.are.equal('tensor(freed)', tostring(x))
  end)
end)

describe('set_printoptions', function()
  after_each(function() mf.set_printoptions { profile = 'default' } end)

  it('is read back', function()
    mf.set_printoptions { precision = 2, linewidth = 40 }
    local o = mf.get_printoptions()
    assert.are.equal(2, o.precision)
    assert.are.equal(40, o.linewidth)
    assert.is_nil(o.sci_mode)
    mf.set_printoptions { profile = 'full' }
    assert.are.equal(math.huge, mf.get_printoptions().threshold)
  end)

  it('refuses what it does not know, and then changes nothing', function()
    assert.has.errors(function() mf.set_printoptions { precison = 2 } end)
    assert.has.errors(function() mf.set_printoptions { precision = 2, linewidth = -1 } end)
    assert.has.errors(function() mf.set_printoptions { precision = 1.5 } end)
    assert.has.errors(function() mf.set_printoptions { profile = 'huge' } end)
    assert.are.equal(4, mf.get_printoptions().precision)
  end)
end)

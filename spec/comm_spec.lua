-- mf.comm: every function on 1 to 4 ranks, as threads that share memory and as processes would talk, on one host
-- and between hosts; tensors of any strides; errors that name op and argument.
local mf = require 'moonflow'
local comm = mf.comm

local function program()
  local i = 0
  while arg[i - 1] do i = i - 1 end
  return arg[i]
end

-- The thread sanitizer does not know ZeroMQ.
local members = program():find '/thread' and { 'local' } or { 'local', 'zmq', 'hosts' }

local function each(f)
  for _, member in ipairs(members) do
    for _, n in ipairs { 1, 2, 4 } do f(member, n) end
  end
end

describe('collectives', function()
  it('sums, and works on tensors of any strides', function()
    each(function(member, n)
      local got = comm._spawn(n, function(r, size)
        local m, c = require 'moonflow', require 'moonflow'.comm
        local t = (m.arange(6):reshape(2, 3) * (r + 1)):to(m.float64):t()
        assert(not t:is_contiguous() and m.rank() == r and m.world_size() == size)
        assert(rawequal(c.all_reduce(t), t))
        local top = c.all_reduce(m.tensor { r, -r }, 'max')
        local mean = c.all_reduce(m.tensor { r + 0.0 }, { op = 'avg' })
        return { t:tolist(), top:tolist(), mean:item() }
      end, { member = member })
      local k = n * (n + 1) / 2
      for r = 1, n do
        assert.same({ { 0, 3 * k }, { k, 4 * k }, { 2 * k, 5 * k } }, got[r][1])
        assert.same({ n - 1, 0 }, got[r][2])
        assert.near((n - 1) / 2, got[r][3], 1e-7)
      end
    end)
  end)

  it('gathers tensors of different shapes and dtypes', function()
    each(function(member, n)
      local got = comm._spawn(n, function(r)
        local m, c = require 'moonflow', require 'moonflow'.comm
        local list = c.all_gather({}, m.full({ r, 2 }, r, { dtype = m.int16 }))
        local out = {}
        for i, t in ipairs(list) do out[i] = { tostring(t.shape), tostring(t.dtype), t:sum():item() } end
        local whole = c.all_gather_into_tensor(m.empty(m.world_size(), 3), m.full({ 3 }, r))
        return { out, whole:tolist() }
      end, { member = member })
      for r = 1, n do
        for i = 1, n do
          assert.same({ ('(%d, 2)'):format(i - 1), tostring(mf.int16), 2 * (i - 1) ^ 2 }, got[r][1][i])
          assert.same({ i - 1, i - 1, i - 1 }, got[r][2][i])
        end
      end
    end)
  end)

  it('scatters sums in uneven parts', function()
    each(function(member, n)
      local got = comm._spawn(n, function(r, size)
        local m, c = require 'moonflow', require 'moonflow'.comm
        local list = {}
        for i = 1, size do list[i] = m.full({ i }, 10 * r + i) end
        local mine = c.reduce_scatter(m.empty(r + 1), list)
        local even = c.reduce_scatter_tensor(m.empty(2), m.arange(2 * size):to(m.float32) * (r + 1), 'min')
        return { mine:tolist(), even:tolist() }
      end, { member = member })
      for r = 0, n - 1 do
        local want = {}
        for i = 1, r + 1 do want[i] = 10 * n * (n - 1) / 2 + n * (r + 1) end
        assert.same(want, got[r + 1][1])
        assert.same({ 2 * r, 2 * r + 1 }, got[r + 1][2])
      end
    end)
  end)

  it('exchanges, broadcasts, gathers and scatters', function()
    each(function(member, n)
      local got = comm._spawn(n, function(r, size)
        local m, c = require 'moonflow', require 'moonflow'.comm
        local ins, outs, parts, last = {}, {}, {}, size - 1
        for i = 1, size do
          ins[i], outs[i] = m.full({ 2 }, 10 * r + i - 1), m.empty(2)
          parts[i] = m.full({ 3 }, 100 + i - 1)
        end
        c.all_to_all(outs, ins)
        local all = {}
        for i = 1, size do all[i] = outs[i]:tolist()[2] end
        local b = c.broadcast(m.full({ 2, 2 }, r):t(), last)
        local g = c.gather(m.full({ 1 }, r), nil, { dst = last })
        local s = c.scatter(m.empty(3), r == last and parts or nil, last)
        local sum = c.reduce(m.full({ 2 }, r + 1), last)
        c.barrier()
        return { all, b:tolist(), g and #g, g and g[1]:item(), s:tolist(), r == last and sum:tolist() }
      end, { member = member })
      for r = 0, n - 1 do
        local last, all = n - 1, {}
        for i = 1, n do all[i] = 10 * (i - 1) + r end
        local v = got[r + 1]
        assert.same(all, v[1])
        assert.same({ { last, last }, { last, last } }, v[2])
        if r == last then assert.same({ n, 0 }, { v[3], v[4] }) else assert.is_nil(v[3]) end
        assert.same({ 100 + r, 100 + r, 100 + r }, v[5])
        assert.same(r == last and { n * (n + 1) / 2, n * (n + 1) / 2 }, v[6])
      end
    end)
  end)

  it('works in groups, and in each dtype', function()
    for _, member in ipairs(members) do
      local got = comm._spawn(4, function(r)
        local m, c = require 'moonflow', require 'moonflow'.comm
        local group = c.new_group(r % 2 == 0 and { 2, 0 } or { 1, 3 })
        local out = { c.all_reduce(m.tensor { r }, { group = group }):item() }
        for i, name in ipairs { 'uint8', 'int8', 'int16', 'int32', 'int64', 'float16', 'bfloat16', 'float64' } do
          out[i + 1] = c.all_reduce(m.full({ 3 }, r + 1, { dtype = m[name] }), 'sum', group):sum():item()
        end
        out[#out + 1] = c.all_reduce(m.tensor({ r == 2, false }, { dtype = m.bool }), 'sum', group):tolist()[1]
        return out
      end, { member = member })
      for r = 0, 3 do
        local sum = r % 2 == 0 and 2 or 4
        assert.equal(sum, got[r + 1][1])
        for i = 2, 9 do assert.equal(3 * (sum + 2), got[r + 1][i]) end
        assert.equal(r % 2 == 0, got[r + 1][10])
      end
    end
  end)
end)

describe('messages', function()
  it('carry what a tensor is, along tags', function()
    for _, member in ipairs(members) do
      local got = comm._spawn(3, function(r, n)
        local m, c = require 'moonflow', require 'moonflow'.comm
        local to, from = (r + 1) % n, (r - 1) % n
        c.send(m.full({ 2, 3 }, r, { dtype = m.float64 }):t(), to)
        c.send(m.tensor { r, 7 }, to, { tag = 5, send_meta = false })
        local b = c.recv(from, { tag = 5, shape = { 2 } })
        local a = c.recv(from)
        return { tostring(a.shape), tostring(a.dtype), a:sum():item(), b:tolist() }
      end, { member = member })
      for r = 0, 2 do
        local from = (r - 1) % 3
        assert.same({ '(3, 2)', tostring(mf.float64), 6 * from, { from, 7 } }, got[r + 1])
      end
    end
  end)
end)

describe('errors', function()
  local function fails(text, f)
    local ok, err = pcall(f)
    assert.is_false(ok)
    assert.truthy(tostring(err):find(text, 1, true), tostring(err))
  end

  it('name op and argument', function()
    fails('all_reduce: tensor must be a tensor, is 3', function() comm.all_reduce(3) end)
    fails("all_reduce: op must be one of sum, max, min, avg, is 'mean'", function()
      comm.all_reduce(mf.ones(1), 'mean')
    end)
    fails("all_reduce: op 'avg' needs floats", function() comm.all_reduce(mf.arange(2), 'avg') end)
    fails("there is no option 'gruop'; did you mean 'group'?", function()
      comm.all_reduce(mf.ones(1), { gruop = {} })
    end)
    fails('all_gather: tensor_list has 2 tensors, but the group has 1 ranks', function()
      comm.all_gather({ mf.ones(1), mf.ones(1) }, mf.ones(1))
    end)
    fails('reduce_scatter: the output has 2 elements, but there are 3 to hold', function()
      comm.reduce_scatter(mf.ones(2), { mf.ones(3) })
    end)
    fails('broadcast: rank 1 is not in the group', function() comm.broadcast(mf.ones(1), 1) end)
    fails('send: dst is 1; ranks are 0 to 0', function() comm.send(mf.ones(1), 1) end)
    fails('recv: src is this rank itself', function() comm.recv(0) end)
    fails('new_group: there is no rank 1', function() comm.new_group { 1 } end)
    fails('new_group: rank 0 is there twice', function() comm.new_group { 0, 0 } end)
    fails('all_reduce', function() comm.all_reduce(mf.ones(2, { device = 'meta' })) end)
    fails('comm_spec.lua:', function() comm.barrier(3) end)
  end)

  it('of one rank end all, with its text', function()
    for _, member in ipairs(members) do
      local _, errors = comm._spawn(3, function(r)
        local c = require 'moonflow'.comm
        c.barrier()
        if r == 1 then error 'no more data' end
        c.barrier()
      end, { member = member, catch = true })
      assert.truthy(errors[2]:find('no more data', 1, true), errors[2])
      for _, r in ipairs { 1, 3 } do
        assert.truthy(errors[r]:find('rank 1 on host %S+ raised an error: .*no more data'), errors[r])
      end
    end
  end)

  it('tell what two ranks called', function()
    for _, member in ipairs(members) do
      local _, errors = comm._spawn(2, function(r)
        local m, c = require 'moonflow', require 'moonflow'.comm
        if r == 0 then c.all_reduce(m.ones(3)) else c.all_reduce(m.ones(4)) end
      end, { member = member, catch = true })
      for r = 1, 2 do
        assert.truthy(errors[r]:find('all_reduce of float32 [3] (sum)', 1, true), errors[r])
        assert.truthy(errors[r]:find('all_reduce of float32 [4] (sum)', 1, true), errors[r])
      end
    end
  end)

  it('come when a rank does nothing for the timeout', function()
    local _, errors = comm._spawn(2, function(r)
      local m, c = require 'moonflow', require 'moonflow'.comm
      if r == 0 then return c.all_reduce(m.ones(1)) end
      local start = m.time()
      while m.time() - start < 1 do m.ones(10) end
    end, { catch = true, timeout = 0.3 })
    assert.truthy(errors[1]:find 'nothing moved for .* waited for rank 1', errors[1])
  end)
end)

-- examples/gpt.lua and examples/bert.lua on a text made here, at tiny sizes.
local mf = require 'moonflow'

local program = 0
while arg[program - 1] do program = program - 1 end
local MOONFLOW = arg[program]

-- A text in the form of bible.data: windows of LZW codes behind a head, all big-endian but the codes.
local function packed(text, window)
  local function number(n) return string.char(math.floor(n / 2 ^ 24), math.floor(n / 2 ^ 16) % 256,
    math.floor(n / 256) % 256, n % 256) end

  local function compress(piece)
    local known, n, bits, codes, out = {}, 257, 9, {}, {}
    local function flush() -- a group of eight codes is as many bytes as a code has bits
      local bytes, value, have = {}, 0, 0
      for _, code in ipairs(codes) do
        value, have = value + code * 2 ^ have, have + bits
        while have >= 8 do
          bytes[#bytes + 1] = string.char(value % 256)
          value, have = math.floor(value / 256), have - 8
        end
      end
      if have > 0 then bytes[#bytes + 1] = string.char(value) end
      out[#out + 1], codes = table.concat(bytes), {}
    end
    local function emit(code)
      codes[#codes + 1] = code
      if #codes == 8 then flush() end
    end
    local function pad()
      while #codes > 0 and #codes < 8 do codes[#codes + 1] = 0 end
      if #codes > 0 then flush() end
    end
    for i = 0, 255 do known[string.char(i)] = i end
    local word = ''
    for c in piece:gmatch '.' do
      if known[word .. c] then
        word = word .. c
      else
        emit(known[word])
        if n == 2 ^ bits then -- the reader has that many entries after this code
          pad()
          bits = bits + 1
        end
        known[word .. c], n = n, n + 1
        word = c
      end
    end
    emit(known[word])
    flush()
    return table.concat(out)
  end

  local pieces, head = {}, {}
  for at = 1, #text, window do pieces[#pieces + 1] = compress(text:sub(at, at + window - 1)) end
  local offset = 92 + 4 * (#pieces + 1)
  for i = 1, #pieces + 1 do
    head[i] = number(offset)
    offset = offset + #(pieces[i] or '')
  end
  return 'EC02' .. ('\0'):rep(80) .. number(window) .. number(#pieces) .. table.concat(head) .. table.concat(pieces)
end

describe('language', function()
  local folder

  local function sh(command)
    local p = io.popen(command .. ' 2>&1; echo "exit $?"')
    local text = p:read '*a'
    p:close()
    local output, code = text:match '^(.-)exit (%d+)\n$'
    return output, tonumber(code)
  end

  local function contents(name)
    local f = assert(io.open(folder .. '/' .. name, 'rb'))
    local text = f:read '*a'
    f:close()
    return text
  end

  local function write(name, text)
    local f = assert(io.open(folder .. '/' .. name, 'wb'))
    f:write(text)
    f:close()
  end

  setup(function()
    local p = io.popen 'mktemp -d'
    folder = p:read '*l'
    p:close()
    local lines = {}
    for i = 1, 120 do
      lines[i] = ('the %s dog sees a %s cat.'):format(i % 2 == 0 and 'old' or 'big', i % 3 == 0 and 'red' or 'shy')
    end
    write('text', table.concat(lines, '\n') .. '\n')
  end)
  teardown(function() os.execute('rm -rf ' .. folder) end)

  local tiny = ' --layers 1 --width 32 --heads 2 --context 16 --warmup 5 --lr 0.01 '
  local own = { gpt = tiny .. '--batch 8 --eval 20 ', bert = tiny .. '--batch 16 --eval 35 --mask 0.3 ' }
  local steps = { gpt = 60, bert = 100 }
  local function train(name, more)
    return sh(('%s examples/%s.lua --data %s/text%s--steps %d %s'):format(MOONFLOW, name, folder, own[name],
      steps[name], more))
  end

  -- The validation losses that a run printed.
  local function validation(output)
    local list = {}
    for v in output:gmatch 'validation ([%d.]+)' do list[#list + 1] = tonumber(v) end
    return list
  end

  for _, name in ipairs { 'gpt', 'bert' } do
    it(name .. '.lua learns; compiled, eager and resumed runs agree', function()
      local output, code = train(name, ('--save %s/whole.safetensors'):format(folder))
      assert.equal(0, code, output)
      local losses = validation(output)
      assert.equal(3, #losses, output)
      assert(losses[3] < losses[1] * 0.8, output)

      local eager = train(name, '--eager')
      for i, v in ipairs(validation(eager)) do assert.near(losses[i], v, 0.01 * losses[1]) end
      assert.equal(3, #validation(eager), eager)

      output, code = train(name, ('--resume %s/whole.safetensors'):format(folder))
      assert.equal(0, code, output)
      assert.same({}, validation(output))

      write('interrupt.sh', [[
        $MOONFLOW examples/$NAME.lua --data $FOLDER/text $OPTIONS --save $FOLDER/part.safetensors \
          > $FOLDER/output 2>&1 &
        pid=$!
        for i in $(seq 2400); do grep -q '^step ' $FOLDER/output && break; sleep 0.05; done
        kill -INT $pid
        wait $pid
        echo "exit $?" >> $FOLDER/output]])
      sh(("MOONFLOW=%s NAME=%s FOLDER=%s OPTIONS='%s --steps %d' sh %s/interrupt.sh"):format(MOONFLOW, name, folder,
        own[name], steps[name], folder))
      output = contents 'output'
      local part = folder .. '/part.safetensors'
      local stopped = output:find('--resume ' .. part, 1, true)
      assert(stopped or #validation(output) == 3, output) -- it may have come to its end before, or to samples
      if stopped then
        assert.truthy(output:find 'exit 130', output)
        output, code = train(name, ('--resume %s --save %s'):format(part, part))
        assert.equal(0, code, output)
      end
      assert.is_true(contents 'whole.safetensors' == contents 'part.safetensors', output)
    end)

    it(name .. '.lua says what it takes and what is missing', function()
      local output, code = sh(('%s examples/%s.lua --help'):format(MOONFLOW, name))
      assert.equal(0, code)
      for _, option in ipairs { 'data', 'layers', 'resume', 'eager' } do
        assert.truthy(output:find('--' .. option, 1, true), output)
      end
      output, code = sh(('%s examples/%s.lua --data /nowhere'):format(MOONFLOW, name))
      assert.same({ 'cannot read /nowhere\n', 1 }, { output, code })
      write('latin', ('caf\233 '):rep(1000))
      output, code = sh(('%s examples/%s.lua --data %s/latin'):format(MOONFLOW, name, folder))
      assert.same({ folder .. '/latin is not a text in UTF-8\n', 1 }, { output, code })
      write('accents', ('Ah, où est le café là-bas ? '):rep(300))
      output, code = train(name, ('--data %s/accents --steps 2 --save %s/a.safetensors'):format(folder, folder))
      assert.equal(0, code, output)
      if io.open '/usr/lib/bible.data' then return end
      output, code = sh(('%s examples/%s.lua'):format(MOONFLOW, name))
      assert.equal(1, code)
      assert.truthy(output:find('bible-kjv-text', 1, true) and output:find('--data', 1, true), output)
    end)
  end

  it('gpt.lua writes what it was asked for', function()
    local output = train('gpt', ('--save %s/g.safetensors'):format(folder))
    local function sample(more)
      local text, code = sh(('%s examples/gpt.lua --steps 60 --resume %s/g.safetensors --prompt "the old" %s'):format(
        MOONFLOW, folder, more))
      assert.equal(0, code, text)
      return text
    end
    local greedy = sample '--length 30 --top-k 1'
    assert.equal(1 + #'the old' + 30 + 1, #greedy, output .. greedy)
    assert.equal(greedy, sample '--length 30 --top-k 1 --seed 9 --temperature 3')
    assert.are_not.equal(sample '--length 30 --temperature 2', sample '--length 30 --temperature 2 --seed 9')
    assert.equal('\nthe old\n', sample '--length 0')
  end)

  it('bert.lua guesses for each blank', function()
    local output, code = train('bert', '--fill "the old _ sees a _ cat."')
    assert.equal(0, code, output)
    local first, second = output:match 'the old _ sees a _ cat%.\n  ([^\n]*)\n  ([^\n]*)\n$'
    assert.truthy(first and first:find '^dog ', output)
    assert.truthy(second:find '^shy ' or second:find '^red ', output)
  end)

  it('read the form of the Bible that Debian has', function()
    local language = assert(loadfile 'examples/language.lua')()
    local verses, want = { 'A title.' }, {}
    for i = 1, 900 do
      local verse = ('And it came to pass in year %d, that %s said: %d.'):format(i * 7919 % 1000, ('la'):rep(i % 40), i)
      verses[#verses + 1] = ('%dSam%d:%d %s'):format(i % 2 + 1, i, i, verse)
      want[i] = verse
    end
    write('bible.data', packed(table.concat(verses, '\n') .. '\n', 30000))
    assert.equal(table.concat(want, '\n') .. '\n', language.read(folder .. '/bible.data'))
  end)

  it('cut a text into symbols, commonest first', function()
    local language = assert(loadfile 'examples/language.lua')()
    local list, number = language.symbols('b a b c a b', '%a', 2, 5)
    assert.same({ 'b', 'a' }, list)
    assert.same({ b = 5, a = 6 }, number)
    assert.same({ 5, 6, 5, 1, 6, 5 }, language.encode('b a b c a b', '%a', number, 1))
    local parts = language.split { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19 }
    assert.same({ 18, 19 }, parts.valid:tolist())
    local pieces = language.pieces(parts.train, 50, 4)
    assert.is_true(pieces.shape == mf.zeros(50, 4).shape)
    assert.is_true(mf.equal(pieces - pieces[{ {}, { 0, 1 } }], mf.arange(4):expand(50, 4)))
    assert.is_true(pieces:max():item() == 17 and pieces:min():item() == 0)
  end)
end)

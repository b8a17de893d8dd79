-- Programs run by a shell, for specs: a folder of their own, files in it, and scripts in which $M is the
-- program that runs the spec, $D the folder and $P a port that no other run of specs takes.
local shell = {}

function shell.quote(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

function shell.slurp(path)
  local f = assert(io.open(path, 'rb'))
  local text = f:read '*a'
  f:close()
  return text
end

do
  local i = 0
  while arg[i - 1] do i = i - 1 end
  shell.program = arg[i]
end

function shell.open()
  local p = io.popen 'mktemp -d'
  shell.folder = p:read '*l'
  p:close()
end
function shell.close() os.execute('rm -rf ' .. shell.quote(shell.folder)) end

function shell.file(name, text)
  local path = shell.folder .. '/' .. name
  local f = assert(io.open(path, 'wb'))
  f:write(text)
  f:close()
  return path
end

-- stdout, stderr and the exit code of a script, which has 100 seconds. What launchers and users may have
-- set is not seen by it.
function shell.run(script)
  local names = ('M=%s\nD=%s\nP=$((30000 + $$ %% 20000))\n'):format(shell.quote(shell.program),
    shell.quote(shell.folder))
  local clean = 'unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT LOCAL_RANK OMP_NUM_THREADS LUA_INIT\n'
  local path, folder = shell.file('run.sh', names .. clean .. script), shell.quote(shell.folder)
  os.execute(('timeout --foreground 100 sh %s > %s/out 2> %s/err; echo $? > %s/rc'):format(shell.quote(path), folder,
    folder, folder))
  return shell.slurp(shell.folder .. '/out'), shell.slurp(shell.folder .. '/err'),
    tonumber(shell.slurp(shell.folder .. '/rc'))
end

return shell

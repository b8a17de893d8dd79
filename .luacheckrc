-- Lua as LuaJIT runs it; busted's names in the specs.
std = 'luajit'
max_line_length = 120
codes = true
exclude_files = { 'build' }
ignore = {
  '212/self', -- a method that does not use it
  '581', -- `not (a < b)` is meant: NaN
}
files['spec/**/*_spec.lua'] = { std = '+busted' }
files['spec/goldens'] = { max_line_length = false }
files['spec/nn'] = { max_line_length = false }
files['.luacheckrc'] = { std = 'max' }

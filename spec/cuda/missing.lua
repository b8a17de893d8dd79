-- Ops that have no kernel for cuda devices yet, by name.
local missing = {}
for name in ([[
]]):gmatch '%S+' do missing[name] = true end
return missing

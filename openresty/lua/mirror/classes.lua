--- The device classes that exist; a stack has one or more of them.

local _M = { ALL = { "cpu", "gpu", "tpu" }, IS = {} }

for _, class in ipairs(_M.ALL) do
    _M.IS[class] = true
end

return _M

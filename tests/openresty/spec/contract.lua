--- The contract files that Python checks too.

local cjson = require("cjson")

local _M = {}

function _M.read(name)
    local file = assert(io.open("tests/contracts/" .. name .. ".json"))
    local text = file:read("*a")
    file:close()
    return cjson.decode(text)
end

return _M

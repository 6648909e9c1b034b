--- Which methods a path takes.

local _M = {}

local GENERATE = { allow = "POST, OPTIONS", POST = true, OPTIONS = true }
local READ = { allow = "GET, HEAD, OPTIONS", GET = true, HEAD = true, OPTIONS = true }

local BY_PATH = {
    ["/"] = READ,
    ["/v1/chat/completions"] = GENERATE,
    ["/v1/completions"] = GENERATE,
    ["/v1/models"] = READ,
    ["/health"] = READ,
    ["/metrics"] = READ,
}

local function of(path)
    if BY_PATH[path] then
        return BY_PATH[path]
    end
    return path:sub(1, 11) == "/v1/models/" and READ or nil
end

function _M.is_allowed(path, method)
    local methods = of(path)
    return methods ~= nil and methods[method] == true
end

--- The value of `Allow`; nil for a path that does not exist.
function _M.allow(path)
    local methods = of(path)
    return methods and methods.allow
end

return _M

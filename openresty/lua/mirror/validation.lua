--- Checks of documents that people or other processes write: the first fault ends them.

local cjson = require("cjson.safe")

local _M = {}

--- End the check around with `message`; `path` is the key at fault, where one is known.
function _M.fail(message, path)
    error({ message = message, path = path }, 0)
end

--- As `fail`, for what was `seen` (a text) at `path` where only `allowed` may be.
function _M.refuse_as(path, seen, allowed)
    _M.fail(string.format("%s is %s; %s", path, seen, allowed), path)
end

local function shown(value)
    if value == cjson.null then
        return "null"
    end
    if type(value) == "string" then
        return '"' .. value:sub(1, 40) .. '"'
    end
    return type(value) == "table" and "a table" or tostring(value)
end

--- As `refuse_as`, of a value.
function _M.refuse(path, value, allowed)
    _M.refuse_as(path, shown(value), allowed)
end

function _M.is_finite(value)
    return type(value) == "number" and value == value and value > -math.huge and value < math.huge
end

--- Call `check`, which may fail. True and what it returned; or nil, a sentence and the path. `name`
-- begins the sentence: it says which document it was.
function _M.run(name, check, ...)
    local is_valid, result = pcall(check, ...)
    if is_valid then
        return true, result
    end
    if type(result) == "table" then
        return nil, name .. ": " .. result.message, result.path
    end
    return nil, name .. ": " .. tostring(result), ""
end

return _M

--- A JSON document in a shared dict, decoded once by each nginx worker for each version.

local cjson = require("cjson.safe")

local _M = {}
local Document = {}
Document.__index = Document

--- `name` keeps documents in one dict apart.
function _M.new(dict, name)
    return setmetatable({ dict = dict, name = name, version = 0 }, Document)
end

--- Put `value` in the place of the old one for all workers. True, or nil and why not.
function Document:put(value)
    local text, reason = cjson.encode(value)
    if not text then
        return nil, reason
    end
    local is_stored, failure = self.dict:safe_set(self.name .. "|text", text)
    if not is_stored then
        return nil, failure
    end
    -- The text comes first: a worker that sees the new version finds at least that text.
    self.dict:incr(self.name .. "|version", 1, 0)
    return true
end

--- The value, or nil where none was ever put; and its version, which changes with it.
function Document:get()
    local version = self.dict:get(self.name .. "|version") or 0
    if version ~= self.version then
        local text = self.dict:get(self.name .. "|text")
        self.value = text and cjson.decode(text)
        self.version = version
    end
    return self.value, version
end

return _M

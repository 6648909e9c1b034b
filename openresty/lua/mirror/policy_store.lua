--- The routing policy in force, shared by all nginx workers: from its file, or put by an operator.
--
-- What was put stays until the file changes.

local document = require("mirror.document")
local policy_rules = require("mirror.policy_rules")

local _M = {}
local PolicyStore = {}
PolicyStore.__index = PolicyStore

--- `dict`: a shared dict; `read()` gives the text of the policy's file, or nil and why not.
function _M.new(dict, read)
    local store = { dict = dict, read = read, document = document.new(dict, "policy") }
    return setmetatable(store, PolicyStore)
end

-- The reason, once for each: a bad file is looked at each second.
local function refuse(self, cause, reason)
    if self.refused == cause then
        return false
    end
    self.refused = cause
    return nil, reason
end

--- Put the file's policy in force where its text has changed. True, false where it has not (or is
-- as bad as before), or nil and a sentence with the line at fault: then the old policy stays.
function PolicyStore:reload()
    local text, failure = self.read()
    if not text then
        local reason = "policy: the file cannot be read: " .. tostring(failure)
        return refuse(self, reason, reason)
    end
    if text == self.dict:get("policy|file") and self.document:get() then
        self.refused = nil
        return false
    end
    local policy, message = policy_rules.from_lua(text)
    if not policy then
        return refuse(self, text, message)
    end
    local is_stored, reason = self.document:put(policy)
    if not is_stored then
        return refuse(self, text, "policy: it cannot be stored: " .. reason)
    end
    -- Where this finds no room the file is only read again: nothing is pushed out for it.
    self.dict:safe_set("policy|file", text)
    return true
end

--- Put `policy`, a valid one, in force. True, or nil and why not.
function PolicyStore:put(policy)
    return self.document:put(policy)
end

--- The policy and its version.
function PolicyStore:get()
    return self.document:get()
end

return _M

--- The weight document of the probe: checked, shared by all nginx workers, and believed for 5 s.

local cjson = require("cjson.safe")
local classes = require("mirror.classes")
local document = require("mirror.document")
local policy_rules = require("mirror.policy_rules")
local validation = require("mirror.validation")

local _M = {}
local Weights = {}
Weights.__index = Weights

_M.FRESH_S = 5
local LEVEL_MAX = 3
-- Measurements that may be there beside the factor; null where a device does not tell.
local MEASURED = { "utilisation", "memory_pressure", "in_flight", "slots" }

local is_finite, refuse = validation.is_finite, validation.refuse

local function is_share(value)
    return is_finite(value) and value >= 0 and value <= 1
end

local function is_whole(value, limit)
    return is_finite(value) and value >= 0 and value % 1 == 0 and value <= limit
end

local function check_class(class, entry)
    local path = "classes." .. tostring(class)
    if not classes.IS[class] then
        refuse(path, entry, "a class is one of " .. table.concat(classes.ALL, ", "))
    end
    if type(entry) ~= "table" then
        refuse(path, entry, "it must be an object with a factor")
    end
    if not is_share(entry.factor) then
        refuse(path .. ".factor", entry.factor, "it must be a number from 0 to 1")
    end
    if entry.health ~= nil and not is_share(entry.health) then
        refuse(path .. ".health", entry.health, "it must be a number from 0 to 1")
    end
    for _, key in ipairs(MEASURED) do
        local value = entry[key]
        if value ~= nil and value ~= cjson.null and not (is_finite(value) and value >= 0) then
            refuse(path .. "." .. key, value, "it must be a number of at least 0")
        end
    end
    local temperature = entry.temperature_c
    if temperature ~= nil and temperature ~= cjson.null and not is_finite(temperature) then
        refuse(path .. ".temperature_c", temperature, "it must be a number")
    end
end

local function check(candidate, now, stored)
    if type(candidate) ~= "table" then
        refuse("it", candidate, "it must be an object")
    end
    local at = candidate.at
    if not is_whole(candidate.version, 2 ^ 53) then
        refuse("version", candidate.version, "it must be a whole number of at least 0")
    end
    if not is_finite(at) then
        refuse("at", at, "it must be Unix seconds")
    end
    if at > now + _M.FRESH_S then
        refuse("at", at, "it lies in the future: it is now " .. now)
    end
    if at < now - _M.FRESH_S then
        refuse("at", at, "it is too old: it is now " .. now)
    end
    -- After the clock was set back, what is stored lies in the future and does not count.
    -- Stored times are rounded to less than a millisecond.
    if stored and at < stored.at - 0.001 and stored.at <= now + _M.FRESH_S then
        refuse("at", at, "it is older than the document that is stored")
    end
    if candidate.degrade_level ~= nil and not is_whole(candidate.degrade_level, LEVEL_MAX) then
        refuse("degrade_level", candidate.degrade_level, "it must be 0, 1, 2 or 3")
    end
    if candidate.draft_factor ~= nil and not is_share(candidate.draft_factor) then
        refuse("draft_factor", candidate.draft_factor, "it must be a number from 0 to 1")
    end
    if candidate.splits ~= nil then
        policy_rules.check_splits("splits", candidate.splits)
    end
    if type(candidate.classes) ~= "table" then
        refuse("classes", candidate.classes, "it must be an object of classes")
    end
    for class, entry in pairs(candidate.classes) do
        check_class(class, entry)
    end
end

--- True, or nil and a sentence that names the key, the value and what is allowed. `now` is Unix
-- seconds, `stored` the document in force or nil.
function _M.validate(candidate, now, stored)
    local is_valid, message = validation.run("weights", check, candidate, now, stored)
    if is_valid then
        return true
    end
    return nil, message
end

--- `dict`: a shared dict; `clock`: a function of Unix seconds.
function _M.new(dict, clock)
    local stale = { factors = {}, health = {}, slots = {}, is_stale = true }
    stale.degrade_level, stale.draft_factor = 0, 1
    local weights = { document = document.new(dict, "weights"), clock = clock, stale = stale }
    return setmetatable(weights, Weights)
end

--- Put the document in `text` in force. True, or nil and why not: then the old one stays.
function Weights:put(text)
    local candidate, reason = cjson.decode(text)
    if candidate == nil then
        return nil, "weights: it is not JSON: " .. tostring(reason)
    end
    local now = self.clock()
    local is_valid, message = _M.validate(candidate, now, (self.document:get()))
    if not is_valid then
        return nil, message
    end
    candidate.received_at = now
    return self.document:put(candidate)
end

--- The document in force, or nil where none ever came.
function Weights:stored()
    return (self.document:get())
end

--- Seconds since the document was made or came, whichever is longer ago; nil where none ever came.
function Weights:age_s()
    local stored = self.document:get()
    return stored and math.max(0, self.clock() - math.min(stored.at, stored.received_at))
end

local function view(stored)
    local live = { factors = {}, health = {}, slots = {} }
    live.degrade_level = stored.degrade_level or 0
    live.draft_factor = stored.draft_factor or 1
    live.splits = stored.splits
    for class, entry in pairs(stored.classes) do
        live.factors[class] = entry.factor
        live.health[class] = entry.health or entry.factor
        live.slots[class] = type(entry.slots) == "number" and entry.slots or nil
    end
    live.is_stale = false
    return live
end

--- What routing goes by: `factors`, `health` (the factor without what only evens out the load) and
-- `slots` by class, `degrade_level`, `draft_factor` (of the drafting on other devices), `is_stale`;
-- `splits`, where there are some, are shares by prompt length that stand for those of the policy.
-- Where the document is older than `FRESH_S` or there is none, nothing is held back.
function Weights:live()
    local stored, version = self.document:get()
    if not stored or self:age_s() > _M.FRESH_S then
        return self.stale
    end
    if version ~= self.version then
        self.version, self.fresh = version, view(stored)
    end
    return self.fresh
end

return _M

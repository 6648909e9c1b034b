--- What a routing policy may hold (`mirror.policy` is the default one).

local cjson = require("cjson.safe")
local classes = require("mirror.classes")
local lua_table = require("mirror.lua_table")
local validation = require("mirror.validation")

local _M = {}

--- The largest text: while it is checked, the requests of an nginx worker wait.
_M.BYTES_MAX = 65536

local TIERS = { vip = true, standard = true }
local STEPS = 64
-- Products and sums of such weights and factors stay finite.
local WEIGHT_MAX = 1e6
local RATE_MAX = 4

local is_finite, refuse, refuse_as =
    validation.is_finite, validation.refuse, validation.refuse_as

local function check_keys(path, value, what, names)
    if type(value) ~= "table" then
        refuse(path, value, "it must be a table: " .. what)
    end
    local known = {}
    for _, name in ipairs(names) do
        known[name] = true
    end
    for key in pairs(value) do
        if not known[key] then
            local place = type(key) == "number" and path .. "[" .. key .. "]"
                or (path == "the policy" and key or path .. "." .. key)
            local message = ": there is no such key; known are " .. table.concat(names, ", ")
            validation.fail(place .. message, place)
        end
    end
end

-- Numbers by class, each for which `is_allowed`; their sum.
local function check_classes(path, numbers, is_allowed, allowed)
    check_keys(path, numbers, "numbers by class", classes.ALL)
    local total = 0
    for _, class in ipairs(classes.ALL) do
        local number = numbers[class]
        if number ~= nil then
            if not is_finite(number) or not is_allowed(number) then
                refuse(path .. "." .. class, number, allowed)
            end
            total = total + number
        end
    end
    return total
end

local function is_weight(number)
    return number >= 0 and number <= WEIGHT_MAX
end

local function check_weights(path, weights)
    local total = check_classes(path, weights, is_weight, "a weight is a number from 0 to 1000000")
    if total <= 0 then
        refuse(path, weights, "the weights must add up to more than 0")
    end
end

-- A list of steps whose `below` rises; `check_step` looks at the rest of each.
local function check_steps(path, steps, names, check_step)
    if type(steps) ~= "table" or #steps == 0 then
        refuse(path, steps, "it must be a list of at least one table")
    end
    for key in pairs(steps) do
        if type(key) ~= "number" or key > #steps then
            refuse_as(path, "with " .. tostring(key), "it must be a list")
        end
    end
    if #steps > STEPS then
        refuse_as(path, "a list of " .. #steps, "it must have at most " .. STEPS)
    end
    local floor = 0
    for index, step in ipairs(steps) do
        local place = path .. "[" .. index .. "]"
        check_keys(place, step, table.concat(names, ", "), names)
        if index == #steps then
            if step.below ~= nil then
                refuse(place .. ".below", step.below, "the last one has none")
            end
        elseif not is_finite(step.below) or step.below <= floor then
            refuse(place .. ".below", step.below, "it must be a number above " .. floor)
        end
        floor = step.below
        check_step(place, step)
    end
end

local function check_bucket(path, bucket)
    check_weights(path .. ".weights", bucket.weights)
end

local function check_band(path, band)
    if band.factors ~= nil then
        local allowed = "a factor is a number from 0 to 1000000"
        check_classes(path .. ".factors", band.factors, is_weight, allowed)
    end
    local spread = band.spread
    if spread ~= nil and not (is_finite(spread) and spread >= 0 and spread <= 1) then
        refuse(path .. ".spread", spread, "it must be a number from 0 to 1")
    end
end

local function check_preference(path, list)
    if type(list) ~= "table" or #list == 0 then
        refuse(path, list, "it must be a list of classes, the fastest first")
    end
    local seen, count = {}, 0
    for key, class in pairs(list) do
        local place = path .. "[" .. tostring(key) .. "]"
        if type(key) ~= "number" or not classes.IS[class] then
            refuse(place, class, "a class is one of " .. table.concat(classes.ALL, ", "))
        end
        if seen[class] then
            refuse(place, class, "each class may be there once")
        end
        seen[class], count = true, count + 1
    end
    if count ~= #list then
        refuse_as(path, "a list with gaps", "it must be a list of classes, the fastest first")
    end
end

local function check_tiers(tiers)
    check_keys("tiers", tiers, "vip and standard", { "vip", "standard" })
    for tier in pairs(TIERS) do
        local rule, path = tiers[tier], "tiers." .. tier
        if rule ~= nil then
            check_keys(path, rule, "prefer and healthy_factor", { "prefer", "healthy_factor" })
            if rule.prefer ~= nil then
                check_preference(path .. ".prefer", rule.prefer)
            end
            local factor = rule.healthy_factor
            if factor ~= nil and not (is_finite(factor) and factor >= 0 and factor <= 1) then
                refuse(path .. ".healthy_factor", factor, "it must be a number from 0 to 1")
            end
        end
    end
end

local function is_cap(number)
    return number >= 1 and number % 1 == 0
end

local KEYS = {
    "prompt_buckets", "qps_bands", "fallback", "tiers", "caps", "tokens_per_ascii_byte",
    "tokens_per_non_ascii_byte",
}

local function check(policy)
    check_keys("the policy", policy, "prompt_buckets and more", KEYS)
    check_steps("prompt_buckets", policy.prompt_buckets, { "below", "weights" }, check_bucket)
    check_steps("qps_bands", policy.qps_bands, { "below", "factors", "spread" }, check_band)
    check_weights("fallback", policy.fallback)
    check_tiers(policy.tiers)
    check_classes("caps", policy.caps, is_cap, "a cap is a whole number of at least 1")
    for _, key in ipairs({ "tokens_per_ascii_byte", "tokens_per_non_ascii_byte" }) do
        if not is_finite(policy[key]) or policy[key] <= 0 or policy[key] > RATE_MAX then
            refuse(key, policy[key], "it must be a number above 0, at most " .. RATE_MAX)
        end
    end
end

local function check_split(path, split)
    check_weights(path .. ".shares", split.shares)
end

--- Raises by `validation.refuse` unless `splits` lists shares by class for rising prompt lengths.
function _M.check_splits(path, splits)
    check_steps(path, splits, { "below", "shares" }, check_split)
end

--- True, or nil, a sentence that names the key, the value and what is allowed, and the key's path.
function _M.validate(policy)
    local is_valid, message, path = validation.run("policy", check, policy)
    if is_valid then
        return true
    end
    return nil, message, path
end

-- A key that is missing has no line; the table that should hold it has.
local function line_of(path, lines)
    while path ~= "" and not lines[path] do
        path = path:match("^(.*)%[%d+%]$") or path:match("^(.*)%.[^.]*$") or ""
    end
    return lines[path]
end

local function refuse_size(text)
    if #text > _M.BYTES_MAX then
        return string.format("policy: it has more than %d bytes", _M.BYTES_MAX)
    end
end

--- The policy in a Lua text, or nil and a sentence with the line at fault.
function _M.from_lua(text)
    local excess = refuse_size(text)
    if excess then
        return nil, excess
    end
    local policy, lines = lua_table.parse(text)
    if not policy then
        return nil, "policy: " .. lines
    end
    local is_valid, message, path = _M.validate(policy)
    if not is_valid then
        return nil, message:gsub("^policy: ", "policy: line " .. line_of(path, lines) .. ": ", 1)
    end
    return policy
end

--- The policy in a JSON text, or nil and a sentence with the key at fault.
function _M.from_json(text)
    local excess = refuse_size(text)
    if excess then
        return nil, excess
    end
    -- Some editors begin a file with a byte order mark.
    local policy, reason = cjson.decode((text:gsub("^\239\187\191", "")))
    if policy == nil then
        return nil, "policy: it is not JSON: " .. tostring(reason)
    end
    local is_valid, message = _M.validate(policy)
    if not is_valid then
        return nil, message
    end
    return policy
end

return _M

--- The table that operators tune: which device class takes which requests.
--
-- `prompt_buckets`: the first bucket whose `below` exceeds the prompt estimate applies; the last
-- has no `below`. `weights` are shares by class; classes that the stack does not have are left out
-- and the rest share what remains. `fallback` holds the weights where none of a bucket's classes
-- is present. `tokens_per_*`: a Han character is 3 bytes and about 0.6 token, an English one 1
-- byte and about 0.3 token.

local _M = {}

_M.CLASSES = { "cpu", "gpu", "tpu" }

_M.default = {
    prompt_buckets = {
        { below = 50, weights = { cpu = 0.7, gpu = 0.3 } },
        { weights = { tpu = 0.6, gpu = 0.4 } },
    },
    fallback = { cpu = 1, gpu = 1, tpu = 1 },
    tokens_per_ascii_byte = 0.3,
    tokens_per_non_ascii_byte = 0.2,
}

local KEYS = {
    prompt_buckets = true,
    fallback = true,
    tokens_per_ascii_byte = true,
    tokens_per_non_ascii_byte = true,
}

local IS_CLASS = {}
for _, class in ipairs(_M.CLASSES) do
    IS_CLASS[class] = true
end

local function refuse(path, value, allowed)
    error({ message = string.format("policy: %s is %s; %s", path, tostring(value), allowed) }, 0)
end

local function is_finite(value)
    return type(value) == "number" and value == value and value < math.huge
end

local function check_weights(path, weights)
    if type(weights) ~= "table" then
        refuse(path, weights, "it must be a table of weights by class")
    end
    local total = 0
    for class, weight in pairs(weights) do
        if not IS_CLASS[class] then
            refuse(path, class, "a class is one of " .. table.concat(_M.CLASSES, ", "))
        end
        if not is_finite(weight) or weight < 0 then
            refuse(path .. "." .. class, weight, "a weight is a number of at least 0")
        end
        total = total + weight
    end
    if total <= 0 then
        refuse(path, total, "the weights must add up to more than 0")
    end
end

local function check_buckets(buckets)
    if type(buckets) ~= "table" or #buckets == 0 then
        refuse("prompt_buckets", buckets, "it must be a list of buckets")
    end
    local floor = 0
    for index, bucket in ipairs(buckets) do
        local path = "prompt_buckets[" .. index .. "]"
        if type(bucket) ~= "table" then
            refuse(path, bucket, "a bucket is a table with below and weights")
        end
        for key in pairs(bucket) do
            if key ~= "below" and key ~= "weights" then
                refuse(path, key, "a bucket has only below and weights")
            end
        end
        if index == #buckets then
            if bucket.below ~= nil then
                refuse(path .. ".below", bucket.below, "the last bucket has none")
            end
        elseif not is_finite(bucket.below) or bucket.below <= floor then
            refuse(path .. ".below", bucket.below, "it must be a number above " .. floor)
        end
        floor = bucket.below
        check_weights(path .. ".weights", bucket.weights)
    end
end

local function check(policy)
    if type(policy) ~= "table" then
        refuse("it", policy, "it must be a table")
    end
    for key in pairs(policy) do
        if not KEYS[key] then
            refuse(tostring(key), policy[key], "there is no such key")
        end
    end
    check_buckets(policy.prompt_buckets)
    check_weights("fallback", policy.fallback)
    for _, key in ipairs({ "tokens_per_ascii_byte", "tokens_per_non_ascii_byte" }) do
        if not is_finite(policy[key]) or policy[key] <= 0 then
            refuse(key, policy[key], "it must be a number above 0")
        end
    end
end

--- True, or nil and a sentence that names the key, the value and what is allowed.
function _M.validate(policy)
    local is_valid, refusal = pcall(check, policy)
    if is_valid then
        return true
    end
    if type(refusal) == "table" then
        return nil, refusal.message
    end
    return nil, "policy: " .. tostring(refusal)
end

return _M

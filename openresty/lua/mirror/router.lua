--- Choice of the device class of a request: policy weight x live factor, smooth weighted.
--
-- A router lives in one nginx worker. Each of them keeps its own shares exact, so their sum is.

local _M = {}
local Router = {}
Router.__index = Router

--- `policy` is a valid table of `mirror.policy`; `classes` lists the classes present.
function _M.new(policy, classes)
    -- Smooth weighted turns by bucket: how far each class is behind its share.
    local turns = {}
    for index in ipairs(policy.prompt_buckets) do
        turns[index] = {}
    end
    return setmetatable({ policy = policy, classes = classes, turns = turns }, Router)
end

local function bucket_of(buckets, prompt_tokens)
    for index, bucket in ipairs(buckets) do
        if bucket.below == nil or prompt_tokens < bucket.below then
            return index
        end
    end
    return #buckets
end

local function effective(weights, classes, factors)
    local shares, total = {}, 0
    for _, class in ipairs(classes) do
        local share = (weights[class] or 0) * (factors and factors[class] or 1)
        shares[class] = share
        total = total + share
    end
    return shares, total
end

--- Shares by class (they add up to 1) for a request `{prompt_tokens}`, and its bucket's index.
-- `factors`, optional, are the probe's factors by class; where they leave nothing they are ignored.
function Router:weights(request, factors)
    local index = bucket_of(self.policy.prompt_buckets, request.prompt_tokens)
    local base = self.policy.prompt_buckets[index].weights
    local shares, total = effective(base, self.classes, factors)
    if total <= 0 then
        shares, total = effective(base, self.classes)
    end
    if total <= 0 then
        shares, total = effective(self.policy.fallback, self.classes)
    end
    for _, class in ipairs(self.classes) do
        shares[class] = total > 0 and shares[class] / total or 1 / #self.classes
    end
    return shares, index
end

--- The class of a request `{prompt_tokens}`.
function Router:choose(request, factors)
    local shares, index = self:weights(request, factors)
    local turns = self.turns[index]
    local chosen
    for _, class in ipairs(self.classes) do
        turns[class] = (turns[class] or 0) + shares[class]
        if shares[class] > 0 and (chosen == nil or turns[class] > turns[chosen]) then
            chosen = class
        end
    end
    turns[chosen] = turns[chosen] - 1
    return chosen
end

return _M

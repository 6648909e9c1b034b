--- Choice of the device class of a request: policy weight x probe factor x headroom, smooth
-- weighted.
--
-- A router lives in one nginx worker. Each of them keeps its own shares exact, so their sum is.

local min, max = math.min, math.max

local _M = {}
local Router = {}
Router.__index = Router

local NONE = {}
local HEALTHY = 0.5

--- `policy` is a valid table of `mirror.policy`; `classes` lists the classes present.
function _M.new(policy, classes)
    -- Smooth weighted turns by bucket: how far each class is behind its share.
    local turns = {}
    for index in ipairs(policy.prompt_buckets) do
        turns[index] = {}
    end
    local is_present = {}
    for _, class in ipairs(classes) do
        is_present[class] = true
    end
    local router = { policy = policy, classes = classes, is_present = is_present, turns = turns }
    return setmetatable(router, Router)
end

local function step_of(steps, value)
    for index, step in ipairs(steps) do
        if step.below == nil or value < step.below then
            return index, step
        end
    end
end

-- Weights by class that add up to 1, each times its part in `first` and `second`; nil where
-- nothing is left.
local function scaled(self, weights, first, second)
    local shares, total = {}, 0
    for _, class in ipairs(self.classes) do
        local share = (weights[class] or 0) * (first[class] or 1) * (second[class] or 1)
        shares[class] = share
        total = total + share
    end
    if total <= 0 then
        return nil
    end
    for class, share in pairs(shares) do
        shares[class] = share / total
    end
    return shares
end

-- The bucket's weights as the band changes them; nil where the stack has none of its classes.
local function banded(self, bucket, band)
    local base = scaled(self, bucket.weights, band.factors or NONE, NONE)
    local spread = band.spread or 0
    local fallback = spread > 0 and scaled(self, self.policy.fallback, NONE, NONE)
    if not base or not fallback then
        return base
    end
    for class, share in pairs(base) do
        base[class] = share * (1 - spread) + fallback[class] * spread
    end
    return base
end

--- Most requests that a class is given at once: its slots or its cap; endless where nobody knows.
function Router:places(class, slots)
    return min((slots or NONE)[class] or math.huge, self.policy.caps[class] or math.huge)
end

-- What is left of each class: `headroom` 0..1 (1 where nobody knows its places), and how much
-- there is of it for each request that is already there.
local function measure(self, slots, flight)
    local headroom, relief = {}, {}
    for _, class in ipairs(self.classes) do
        local places = self:places(class, slots)
        local taken = flight[class] or 0
        if places < math.huge then
            headroom[class] = places > 0 and max(0, 1 - taken / places) or 0
            relief[class] = places / (taken + 1)
        end
    end
    return headroom, relief
end

--- The classes, as a comma list, that must not take over what waits for others: heat or memory
-- leaves little of them.
function Router:spared(health)
    local found = ""
    for _, class in ipairs(self.classes) do
        if ((health or NONE)[class] or 1) < HEALTHY then
            found = found == "" and class or found .. "," .. class
        end
    end
    return found
end

-- The first class of `prefer` that is healthy and has room; where all are full, the healthy one
-- that is least so. Its requests displace those of other tiers, so only its own take room.
local function preferred(self, rule, health, slots, flight)
    local headroom, relief = measure(self, slots, flight)
    local best
    for _, class in ipairs(rule.prefer) do
        local is_healthy = (health[class] or 1) >= (rule.healthy_factor or HEALTHY)
        if self.is_present[class] and is_healthy then
            if (headroom[class] or 1) > 0 then
                return class, best and "spilled" or "preferred"
            end
            if not best or relief[class] > relief[best] then
                best = class
            end
        end
    end
    return best, best and "full"
end

-- Where the factors hold back every class of the bucket, a part of its requests goes to the classes
-- of the fallback that it leaves out and that are better off: otherwise a bucket of one class would
-- send it everything, however hot it is. `best` of `most`: the highest factor within and without.
local function relieved(self, shares, base, factors, headroom)
    local best, most, others = 0, 0, {}
    for _, class in ipairs(self.classes) do
        local factor = factors[class] or 1
        if (base[class] or 0) > 0 then
            best = max(best, factor)
        else
            most = max(most, factor)
            others[class] = self.policy.fallback[class]
        end
    end
    local elsewhere = most > best and scaled(self, others, factors, headroom)
    if not elsewhere then
        return shares, "policy"
    end
    for class, share in pairs(shares) do
        shares[class] = share * best / most + elsewhere[class] * (1 - best / most)
    end
    return shares, "relieved"
end

-- Shares, and the rule that they come from.
local function weighted(self, base, factors, headroom, relief)
    local fallback = self.policy.fallback
    if base then
        local shares = scaled(self, base, factors, headroom)
        if shares then
            return relieved(self, shares, base, factors, headroom)
        end
    end
    local shares = scaled(self, fallback, factors, headroom)
    if shares then
        return shares, "spilled"
    end
    base = base or scaled(self, fallback, NONE, NONE) or NONE
    shares = scaled(self, base, factors, relief)
    if shares then
        return shares, "full"
    end
    shares = scaled(self, base, NONE, NONE)
    if not shares then
        shares = {}
        for _, class in ipairs(self.classes) do
            shares[class] = 1 / #self.classes
        end
    end
    return shares, "unhealthy"
end

-- The measured shares of a request; nil where there are none, or their classes have no room.
local function split(self, splits, request, headroom)
    if not splits then
        return nil
    end
    local _, step = step_of(splits, request.prompt_tokens)
    return scaled(self, step.shares, NONE, headroom)
end

--- How a request `{prompt_tokens, qps, tier}` would be routed. `live`: tables `factors`, `health`
-- (if not there, the factors), `slots` and `in_flight` by class, each optional; `in_tier` are those
-- in flight of the request's own tier; `splits` are the shares that the devices measured, by prompt
-- length, in which the factors are already.
--
-- `bucket`, `band`: indexes; `base`: the shares of the policy, nil where it gives none; `shares`
-- (they add up to 1); `class`, where the tier's preference settles it; `rule`: "preferred",
-- "measured" (by the splits), "policy", "relieved" (the policy's own classes are held back),
-- "spilled" (they have no room), "full" (none has), "unhealthy" (the factors leave nothing and are
-- ignored); `headroom`.
function Router:weigh(request, live)
    local policy = self.policy
    local bucket, bucket_rule = step_of(policy.prompt_buckets, request.prompt_tokens)
    local band, band_rule = step_of(policy.qps_bands, request.qps or 0)
    local factors = live.factors or NONE
    local slots = live.slots or NONE
    local headroom, relief = measure(self, slots, live.in_flight or NONE)
    local decision = { bucket = bucket, band = band, headroom = headroom }
    local tier = policy.tiers[request.tier]
    if tier and tier.prefer then
        decision.class, decision.rule =
            preferred(self, tier, live.health or factors, slots, live.in_tier or NONE)
    end
    decision.base = banded(self, bucket_rule, band_rule)
    if decision.class then
        decision.shares = { [decision.class] = 1 }
        return decision
    end
    decision.shares, decision.rule = split(self, live.splits, request, headroom), "measured"
    if not decision.shares then
        decision.shares, decision.rule =
            weighted(self, decision.base, factors, headroom, relief)
    end
    return decision
end

-- Whose turn it is; nothing is taken.
local function due(self, decision)
    local turns, chosen, most = self.turns[decision.bucket], nil, nil
    for _, class in ipairs(self.classes) do
        local share = decision.shares[class] or 0
        local turn = (turns[class] or 0) + share
        if share > 0 and (chosen == nil or turn > most) then
            chosen, most = class, turn
        end
    end
    return chosen
end

--- The class that `choose` would take next by this decision.
function Router:next_of(decision)
    return decision.class or due(self, decision)
end

--- The class of a request, and the rule that it was chosen by.
function Router:choose(request, live)
    local decision = self:weigh(request, live or NONE)
    if decision.class then
        return decision.class, decision.rule
    end
    local chosen, turns = due(self, decision), self.turns[decision.bucket]
    for class, share in pairs(decision.shares) do
        turns[class] = (turns[class] or 0) + share
    end
    turns[chosen] = turns[chosen] - 1
    return chosen, decision.rule
end

return _M

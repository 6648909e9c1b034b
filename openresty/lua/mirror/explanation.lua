--- A routing decision in sentences.

local format, concat = string.format, table.concat

local _M = {}

local function by_class(classes, numbers, form)
    local parts = {}
    for _, class in ipairs(classes) do
        if numbers[class] then
            parts[#parts + 1] = class .. " " .. format(form, numbers[class])
        end
    end
    return #parts > 0 and concat(parts, ", ") or "nothing"
end

local function bound(step)
    return step.below and format("below %g", step.below) or "the rest"
end

local function absent(weights, is_present)
    local names = {}
    for class, weight in pairs(weights) do
        if weight > 0 and not is_present[class] then
            names[#names + 1] = class
        end
    end
    table.sort(names)
    return names
end

local function on_policy(add, router, request, decision)
    local policy = router.policy
    local bucket = policy.prompt_buckets[decision.bucket]
    add("%d prompt tokens fall in bucket %d (%s), whose weights are: %s.", request.prompt_tokens,
        decision.bucket, bound(bucket), by_class({ "cpu", "gpu", "tpu" }, bucket.weights, "%g"))
    local missing = absent(bucket.weights, router.is_present)
    if #missing > 0 then
        add("This stack has no %s; the classes that are there share what that leaves.",
            concat(missing, " and no "))
    end
    local band = policy.qps_bands[decision.band]
    local rate = format("%g requests a second fall in band %d (%s)", request.qps, decision.band,
        bound(band))
    if not band.factors and (band.spread or 0) == 0 then
        add("%s, which changes nothing.", rate)
    else
        add("%s: factors %s; %g of the requests follow the fallback weights.", rate,
            by_class(router.classes, band.factors or {}, "%g"), band.spread or 0)
    end
end

local function on_devices(add, router, live, decision)
    if live.is_stale then
        add("There is no weight document of the last 5 seconds: factors and places are unknown.")
    else
        add("The probe's factors are: %s.", by_class(router.classes, live.factors, "%.2f"))
    end
    for _, class in ipairs(router.classes) do
        local health = live.health and live.health[class]
        if health and health ~= live.factors[class] then
            add("The factor of %s evens out the load; its health is %.2f.", class, health)
        end
        local headroom = decision.headroom[class]
        if headroom then
            add("%s has %d requests at present; its headroom is %.2f.", class,
                live.in_flight[class] or 0, headroom)
        end
    end
end

local function on_level(add, request, live)
    if live.degrade_level >= 3 and request.tier == "standard" then
        add("The degradation level is 3: standard requests are refused with a 503.")
    elseif live.degrade_level > 0 then
        add("The degradation level is %d; the class does not depend on it.", live.degrade_level)
    end
end

local RULES = {
    preferred = "Tier %s takes the fastest class that is healthy, in the order %s; "
        .. "only requests of its own tier leave it no room there.",
    spilled_tier = "Tier %s prefers %s; its own requests fill the first of these, so the next "
        .. "takes it.",
    full_tier = "Tier %s prefers %s; its own requests fill all, so the one with most places for "
        .. "each takes it.",
    policy = "Shares are policy weight x factor x headroom: %s.",
    measured = "Shares are those of the measured devices (scheduler.split) x headroom, in place of"
        .. " the policy's: %s.",
    relieved = "The factors hold back every class of the policy, so better ones take a part: %s.",
    spilled = "The classes of the policy have no room or are unfit; the fallback weights give: %s.",
    full = "No class has room; shares follow the policy and the places of each class: %s.",
    unhealthy = "The factors leave nothing, so they are ignored: %s.",
}

local function on_choice(add, router, request, decision)
    if decision.class then
        local rule = decision.rule == "preferred" and "preferred" or decision.rule .. "_tier"
        local order = {}
        for _, class in ipairs(router.policy.tiers[request.tier].prefer) do
            order[#order + 1] = router.is_present[class] and class or nil
        end
        add(RULES[rule], request.tier, concat(order, ", "))
    else
        add(RULES[decision.rule], by_class(router.classes, decision.shares, "%.3f"))
    end
end

--- Sentences on how `router` would route `request` (`Router:weigh`, all keys set) now; and the
-- class and the decision.
function _M.of(router, request, live)
    local decision, sentences = router:weigh(request, live), {}
    local function add(...)
        sentences[#sentences + 1] = format(...)
    end
    on_policy(add, router, request, decision)
    on_devices(add, router, live, decision)
    on_level(add, request, live)
    on_choice(add, router, request, decision)
    local class = router:next_of(decision)
    add("The next such request goes to %s.", class)
    return sentences, class, decision
end

return _M

local body = require("mirror.body")
local edge = require("mirror.edge")
local errors = require("mirror.errors")
local identify = require("mirror.phase.identify")
local usage = require("mirror.usage")
local ngx = ngx

local function refuse(name, details)
    edge.metrics:add("mirror_edge_refusals_total|" .. (details and details.reason or name), 1)
    return errors.refuse(name, details)
end

-- The class, counted in, by which rule, and what that went by.
local function choose(caller, request)
    local router, live = edge.router(), edge.live(caller.tier)
    local class, rule = router:choose(request, live)
    local places = router:places(class, live.slots)
    local taken = edge.count_flight(class, caller.tier, 1)
    if taken > places and live.in_flight[class] < places then
        -- Another worker took the last place at the same moment: look again, once.
        edge.count_flight(class, caller.tier, -1)
        live = edge.live(caller.tier)
        class, rule = router:choose(request, live)
        edge.count_flight(class, caller.tier, 1)
    end
    return class, rule, live
end

local function route(ctx, caller, tokens, rate)
    local request = { prompt_tokens = tokens, qps = rate, tier = caller.tier }
    local class, rule, live = choose(caller, request)
    edge.qps:route(class)
    edge.metrics:add("mirror_edge_routes_total|" .. class .. "|" .. caller.tier .. "|" .. rule, 1)
    ctx.class, ctx.tier = class, caller.tier
    local var = ngx.var
    var.mirror_device = class
    var.mirror_tier = caller.tier
    var.mirror_tenant = caller.tenant
    var.mirror_prompt_estimate = tokens
    var.mirror_degrade = live.degrade_level
    var.mirror_draft_factor = ("%.2f"):format(live.draft_factor)
    var.mirror_spare = edge.router():spared(live.health)
end

--- `is_last`: the connection is closed after this answer.
return function(is_last)
    if not is_last and edge.retirement:is_due() then
        return ngx.exec("@last_generate")
    end
    local caller, ctx = identify(), ngx.ctx
    if edge.is_draining() then
        return refuse("draining")
    end
    if edge.weights:live().degrade_level >= 3 and caller.tier == "standard" then
        return refuse("degraded")
    end
    local is_admitted, refusal = edge.admission:enter(caller)
    if not is_admitted then
        return refuse("rate_limited", refusal)
    end
    ctx.caller = caller
    local rate = edge.qps:arrive(caller.tenant)
    local sample, length = body.read(edge.body_timeout_s)
    if not sample then
        return errors.send(length, length == 400)
    end
    ctx.is_body_read = true
    local tokens = usage.estimate(ctx, sample, length)
    local charge, excess = edge.admission:charge(caller, tokens)
    if not charge then
        return refuse("rate_limited", excess)
    end
    ctx.charge = charge
    return route(ctx, caller, tokens, rate)
end

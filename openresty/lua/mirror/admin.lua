--- The admin endpoints: weights, policy, state, drain, and what routing would do.

local cjson = require("cjson.safe")
local classes = require("mirror.classes")
local edge = require("mirror.edge")
local errors = require("mirror.errors")
local explanation = require("mirror.explanation")
local policy_rules = require("mirror.policy_rules")
local ngx = ngx

local _M = {}

local NO_WEIGHTS = { version = 0, at = 0, classes = {}, degrade_level = 0 }

local function answer(value)
    ngx.header["Content-Type"] = "application/json"
    ngx.print(cjson.encode(value))
end

local function refuse(message, document)
    if document then
        edge.metrics:add("mirror_edge_documents_refused_total|" .. document, 1)
    end
    return errors.refuse("invalid_document", { message = message })
end

local function body()
    ngx.req.read_body()
    ngx.ctx.is_body_read = true
    return ngx.req.get_body_data() or ""
end

local function get_weights()
    answer(edge.weights:stored() or NO_WEIGHTS)
end

local function put_weights()
    local is_put, reason = edge.weights:put(body())
    if not is_put then
        return refuse(reason, "weights")
    end
    answer({ version = edge.weights:stored().version })
end

local function get_policy()
    answer((edge.policies:get()))
end

local function put_policy()
    local text, kind = body(), ngx.var.http_content_type or ""
    local parse = kind:find("^text/x%-lua") and policy_rules.from_lua or policy_rules.from_json
    local policy, message = parse(text)
    if not policy then
        return refuse(message, "policy")
    end
    local is_put, reason = edge.policies:put(policy)
    if not is_put then
        return refuse("policy: it cannot be stored: " .. reason, "policy")
    end
    ngx.log(ngx.NOTICE, "policy put by an operator")
    return get_policy()
end

-- Policy weight x factor of each class and bucket, as they are for the rate of this moment.
local function effective_weights(live, rate)
    local router, result = edge.router(), {}
    for index, bucket in ipairs(router.policy.prompt_buckets) do
        local tokens = bucket.below and math.max(1, math.ceil(bucket.below) - 1) or 1e9
        local request = { prompt_tokens = tokens, qps = rate, tier = "standard" }
        local decision = router:weigh(request, live)
        result[index] = { below = bucket.below, shares = decision.shares, rule = decision.rule }
    end
    return result
end

local function edge_state()
    local live, rate = edge.live(), edge.qps:all()
    local by_class, by_tenant = {}, {}
    for _, class in ipairs(edge.classes) do
        by_class[class] = edge.qps:of_class(class)
    end
    -- The probe asks each second and has no use for thousands of tenants.
    for _, tenant in ipairs(ngx.var.arg_tenants ~= "no" and edge.auth:tenants() or {}) do
        by_tenant[tenant] = edge.qps:of_tenant(tenant)
    end
    return {
        qps = { all = rate, class = by_class, tenant = by_tenant },
        in_flight = live.in_flight,
        factors = live.factors,
        slots = live.slots,
        weights_age_s = edge.weights:age_s() or cjson.null,
        weights_stale = live.is_stale,
        degrade_level = live.degrade_level,
        draining = edge.is_draining(),
        open = edge.auth:is_open() and true or false,
        effective_weights = effective_weights(live, rate),
    }
end

-- The gateway's text goes through as it is: decoding it would turn empty lists into objects.
local function get_state()
    local ctx = {}
    local state = ngx.location.capture("/gateway/state", { ctx = ctx })
    if ctx.peer then
        edge.balancer:release(ctx.peer)
    end
    local own = '{"edge":' .. cjson.encode(edge_state())
    local rest = not state.truncated and state.body and state.body:match("^%s*{(.*)$")
    if not rest then
        state.status = 503
        rest = errors.body(503, nil):sub(2)
    end
    ngx.status = state.status
    ngx.header["Content-Type"] = "application/json"
    ngx.print(own, rest:find("^%s*}") and "" or ",", rest)
end

local function post_drain()
    local wish = cjson.decode(body())
    if type(wish) ~= "table" or type(wish.draining) ~= "boolean" then
        return refuse('drain: send {"draining": true} or {"draining": false}')
    end
    edge.drain(wish.draining)
    ngx.log(ngx.WARN, wish.draining and "draining" or "no longer draining", ", by an operator")
    answer({ draining = wish.draining })
end

local function number_of(text, default, least)
    if text == nil then
        return default
    end
    local number = tonumber(text)
    return number and number == number and number >= least and number < 1e9 and number or nil
end

local function get_route()
    local arguments = ngx.req.get_uri_args(20)
    local request = {
        prompt_tokens = number_of(arguments.prompt_tokens, nil, 0),
        qps = number_of(arguments.qps, edge.qps:all(), 0),
        tier = arguments.tier or "standard",
    }
    if not request.prompt_tokens or not request.qps then
        return refuse("route: prompt_tokens must be a number from 0 to a billion, and qps too "
            .. "where it is given")
    end
    if not edge.TIERS[request.tier] then
        return refuse("route: tier must be vip or standard")
    end
    local live = edge.live(request.tier)
    local sentences, class, decision = explanation.of(edge.router(), request, live)
    local tenant = arguments.tenant
    if type(tenant) == "string" then
        sentences[#sentences + 1] = string.format(
            "The class does not depend on the tenant; %s has %g requests a second and %d at once.",
            tenant, edge.qps:of_tenant(tenant), edge.flight:count("tenant|" .. tenant))
    end
    local shares = {}
    for _, name in ipairs(classes.ALL) do
        shares[name] = decision.shares[name]
    end
    answer({ class = class, rule = decision.rule, shares = shares, reasons = sentences })
end

local HANDLERS = {
    ["/admin/weights"] = { GET = get_weights, PUT = put_weights },
    ["/admin/policy"] = { GET = get_policy, PUT = put_policy },
    ["/admin/state"] = { GET = get_state },
    ["/admin/drain"] = { POST = post_drain },
    ["/admin/route"] = { GET = get_route },
}

local function is_trusted(authorization)
    local sent = authorization and authorization:match("^[Bb]earer +(%S+)%s*$")
    local token = edge.admin_token()
    token = token and token:match("^%s*(%S+)%s*$")
    -- Digests are compared, so that the time tells nothing of the token.
    return sent ~= nil and token ~= nil and edge.digest(sent) == edge.digest(token)
end

--- Answer the request of the admin server.
function _M.serve()
    if not is_trusted(ngx.var.http_authorization) then
        return errors.refuse("invalid_admin_token")
    end
    local methods = HANDLERS[ngx.var.uri]
    if not methods then
        return ngx.exit(ngx.HTTP_NOT_FOUND)
    end
    local handler = methods[ngx.req.get_method()]
    if not handler then
        local allowed = {}
        for method in pairs(methods) do
            allowed[#allowed + 1] = method
        end
        table.sort(allowed)
        ngx.header["Allow"] = table.concat(allowed, ", ")
        return ngx.exit(ngx.HTTP_NOT_ALLOWED)
    end
    return handler()
end

return _M

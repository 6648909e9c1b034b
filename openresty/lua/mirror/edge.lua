--- What one nginx was set up with, built once when it starts, and what its workers share.

local admission = require("mirror.admission")
local auth = require("mirror.auth")
local balancer = require("mirror.balancer")
local classes = require("mirror.classes")
local files = require("mirror.files")
local in_flight = require("mirror.in_flight")
local metrics = require("mirror.metrics")
local policy_rules = require("mirror.policy_rules")
local policy_store = require("mirror.policy_store")
local qps = require("mirror.qps")
local retirement = require("mirror.retirement")
local router = require("mirror.router")
local token_rates = require("mirror.token_rates")
local weights = require("mirror.weights")
local ngx = ngx

local _M = {}

local TIERS = { vip = true, standard = true }
local STANDARD = "standard"

local function split(text)
    local items = {}
    for item in text:gmatch("[^,]+") do
        items[#items + 1] = item:match("^%s*(.-)%s*$")
    end
    return items
end

local function known_classes(names)
    for _, class in ipairs(names) do
        assert(classes.IS[class], "classes: there is no device class " .. class)
    end
    assert(#names > 0, "classes: at least one device class is needed")
    return names
end

--- `settings`: gateways, classes and models as comma lists, body_timeout_s, policy_file, keys_file,
-- admin_token_file, may_be_open (let everybody in where there are no keys); `digest` is SHA-256.
-- Raises where one of them, the policy or the keys are bad, which keeps nginx from starting, and
-- a reload from being done.
function _M.configure(settings, digest)
    local gateways = split(settings.gateways)
    assert(#gateways > 0, "gateways: at least one gateway is needed")
    local shared = ngx.shared
    _M.classes = known_classes(split(settings.classes))
    _M.body_timeout_s = settings.body_timeout_s
    _M.admin_token = files.reader(settings.admin_token_file)
    _M.digest = digest
    _M.control = shared.mirror_control
    _M.flight = in_flight.new(shared.mirror_flight, ngx.worker.pid)
    _M.balancer = balancer.new(gateways, _M.flight, shared.mirror_flight)
    _M.metrics = metrics.new(shared.mirror_metrics)
    _M.qps = qps.new(shared.mirror_usage, ngx.now)
    _M.admission = admission.new(shared.mirror_usage, _M.flight, ngx.now)
    _M.token_rates = token_rates.new(shared.mirror_control, split(settings.models))
    _M.weights = weights.new(shared.mirror_control, ngx.now)
    _M.policies = policy_store.new(shared.mirror_control,
        files.reader(settings.policy_file, policy_rules.BYTES_MAX))
    _M.auth = auth.new(files.reader(settings.keys_file), digest, settings.may_be_open,
        shared.mirror_control)
    for _, part in ipairs({ _M.policies, _M.auth }) do
        local is_loaded, reason = part:reload()
        assert(is_loaded ~= nil, reason)
    end
    _M.router_version = nil
    _M.retirement = retirement.new(shared.mirror_flight)
end

--- The router of the policy in force.
function _M.router()
    local policy, version = _M.policies:get()
    if version ~= _M.router_version then
        _M.routing = router.new(policy, _M.classes)
        _M.router_version = version
    end
    return _M.routing
end

local function tier_at(tier, class)
    return "tier|" .. tier .. "|" .. class
end

--- Count a request in or out (1 or -1) at its class.
-- Returns how many are there now.
function _M.count_flight(class, tier, difference)
    if tier ~= STANDARD then
        _M.flight:add(tier_at(tier, class), difference)
    end
    return _M.flight:add("class|" .. class, difference)
end

--- What routing goes by at this moment: `Weights:live` with the requests in flight by class, and
-- of these the ones of `tier`, unless that is nil or the standard one.
function _M.live(tier)
    local live = _M.weights:live()
    local flight, in_tier = {}, {}
    for _, class in ipairs(_M.classes) do
        flight[class] = _M.flight:count("class|" .. class)
        if tier and tier ~= STANDARD then
            in_tier[class] = _M.flight:count(tier_at(tier, class))
        end
    end
    return {
        factors = live.factors,
        health = live.health,
        slots = live.slots,
        splits = live.splits,
        degrade_level = live.degrade_level,
        draft_factor = live.draft_factor,
        is_stale = live.is_stale,
        in_flight = flight,
        in_tier = in_tier,
    }
end

function _M.is_draining()
    return _M.control:get("draining") == true
end

function _M.drain(is_draining)
    return _M.control:set("draining", is_draining)
end

--- The tiers that exist.
_M.TIERS = TIERS

return _M

--- What one nginx was set up with, built once when it starts: policy, router, balancer, metrics.

local balancer = require("mirror.balancer")
local metrics = require("mirror.metrics")
local policy = require("mirror.policy")
local router = require("mirror.router")
local ngx = ngx

local _M = {}

local function split(text)
    local items = {}
    for item in text:gmatch("[^,]+") do
        items[#items + 1] = item:match("^%s*(.-)%s*$")
    end
    return items
end

local function known_classes(names)
    local is_known = {}
    for _, class in ipairs(policy.CLASSES) do
        is_known[class] = true
    end
    for _, class in ipairs(names) do
        assert(is_known[class], "classes: there is no device class " .. class)
    end
    assert(#names > 0, "classes: at least one device class is needed")
    return names
end

--- `settings`: gateways and classes as comma lists, max_body_bytes, body_timeout_s.
-- Raises where one of them or the policy is bad, which keeps nginx from starting.
function _M.configure(settings)
    local gateways = split(settings.gateways)
    assert(#gateways > 0, "gateways: at least one gateway is needed")
    assert(policy.validate(policy.default))
    _M.policy = policy.default
    _M.body_timeout_s = settings.body_timeout_s
    _M.router = router.new(_M.policy, known_classes(split(settings.classes)))
    _M.balancer = balancer.new(gateways, ngx.shared.mirror_flight, ngx.worker.pid)
    _M.metrics = metrics.new(ngx.shared.mirror_metrics)
end

return _M

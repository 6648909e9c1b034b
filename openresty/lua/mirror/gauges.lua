--- What is measured at the moment of a scrape: nginx's connections, requests at gateways and
-- classes, rates, what the probe's weights do.

local edge = require("mirror.edge")
local ngx = ngx

local _M = {}

local STATES = { "active", "reading", "waiting", "writing" }

local function connections()
    local samples = {}
    for _, state in ipairs(STATES) do
        -- Absent where nginx was built without its status module.
        local count = tonumber(ngx.var["connections_" .. state])
        if count then
            samples[#samples + 1] = { 'state="' .. state .. '"', count }
        end
    end
    return samples
end

local function in_flight()
    local samples = {}
    for index, peer in ipairs(edge.balancer.peers) do
        samples[index] = { 'gateway="' .. (index - 1) .. '"', edge.balancer:in_flight(peer) }
    end
    return samples
end

local function by_class(value_of)
    local samples = {}
    for index, class in ipairs(edge.classes) do
        samples[index] = { 'class="' .. class .. '"', value_of(class) }
    end
    return samples
end

local function one(value)
    return { { nil, value } }
end

local function devices(live)
    return {
        {
            name = "mirror_edge_class_in_flight",
            help = "Generation requests that a class is answering or that wait for it.",
            samples = by_class(function(class)
                return live.in_flight[class]
            end),
        },
        {
            name = "mirror_edge_class_qps",
            help = "Requests routed to a class, per second over the last 5 s.",
            samples = by_class(function(class)
                return edge.qps:of_class(class)
            end),
        },
        {
            name = "mirror_edge_class_factor",
            help = "The probe's factor in use for a class; 1 where it has given none.",
            samples = by_class(function(class)
                return live.factors[class] or 1
            end),
        },
    }
end

local function control(live)
    return {
        {
            name = "mirror_edge_weights_stale",
            help = "1 where no valid weight document is fresh: the policy's weights alone hold.",
            samples = one(live.is_stale and 1 or 0),
        },
        {
            name = "mirror_edge_degrade_level",
            help = "Step of degradation in force, 0 to 3.",
            samples = one(live.degrade_level),
        },
        {
            name = "mirror_edge_draining",
            help = "1 where new generations are refused.",
            samples = one(edge.is_draining() and 1 or 0),
        },
    }
end

--- Gauges for `Metrics:text`; `is_scraped`: a gateway gave its own metrics.
function _M.read(is_scraped)
    local live = edge.live()
    local gauges = {
        {
            name = "mirror_edge_connections",
            help = "Client connections by state.",
            samples = connections(),
        },
        {
            name = "mirror_edge_in_flight",
            help = "Requests that a gateway is answering.",
            samples = in_flight(),
        },
        {
            name = "mirror_edge_gateway_scrape_ok",
            help = "1 where a gateway gave its metrics for this scrape.",
            samples = one(is_scraped and 1 or 0),
        },
    }
    for _, group in ipairs({ devices(live), control(live) }) do
        for _, gauge in ipairs(group) do
            gauges[#gauges + 1] = gauge
        end
    end
    return gauges
end

return _M

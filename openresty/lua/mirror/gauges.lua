--- What is measured at the moment of a scrape: nginx's connections, requests at each gateway.

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

local function in_flight(balancer)
    local samples = {}
    for index, peer in ipairs(balancer.peers) do
        samples[index] = { 'gateway="' .. (index - 1) .. '"', balancer:in_flight(peer) }
    end
    return samples
end

--- Gauges for `Metrics:text`; `is_scraped`: a gateway gave its own metrics.
function _M.read(balancer, is_scraped)
    return {
        {
            name = "mirror_edge_connections",
            help = "Client connections by state.",
            samples = connections(),
        },
        {
            name = "mirror_edge_in_flight",
            help = "Requests that a gateway is answering.",
            samples = in_flight(balancer),
        },
        {
            name = "mirror_edge_gateway_scrape_ok",
            help = "1 where a gateway gave its metrics for this scrape.",
            samples = { { nil, is_scraped and 1 or 0 } },
        },
    }
end

return _M

--- The edge's own metrics, in a shared dict that all nginx workers add to.
--
-- Keys are `name|label value|...`. Every label is drawn from a closed set, so the dict cannot fill.

local concat, format = table.concat, string.format

local _M = {}
local Metrics = {}
Metrics.__index = Metrics

local BUCKETS = { 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60 }

-- In the order of the exposition.
local FAMILIES = {
    {
        name = "mirror_edge_requests_total",
        kind = "counter",
        help = "Requests answered, by device class, tier and HTTP status.",
        labels = { "class", "tier", "status" },
    },
    {
        name = "mirror_edge_request_seconds",
        kind = "histogram",
        help = "From the first byte of a generation request to the last byte of its answer.",
        labels = { "class", "tier" },
    },
    {
        name = "mirror_edge_received_bytes_total",
        kind = "counter",
        help = "Bytes received from clients.",
        labels = {},
    },
    {
        name = "mirror_edge_sent_bytes_total",
        kind = "counter",
        help = "Bytes sent to clients.",
        labels = {},
    },
    {
        name = "mirror_edge_retries_total",
        kind = "counter",
        help = "Requests moved to another gateway because the first one failed.",
        labels = {},
    },
    {
        name = "mirror_edge_stream_errors_total",
        kind = "counter",
        help = "Streams ended with an error event because their gateway was lost.",
        labels = {},
    },
    {
        name = "mirror_edge_incomplete_answers_total",
        kind = "counter",
        help = "Generation requests whose client left before the answer was complete.",
        labels = {},
    },
    {
        name = "mirror_edge_routes_total",
        kind = "counter",
        help = "Requests routed to a class, by the rule that chose it.",
        labels = { "class", "tier", "rule" },
    },
    {
        name = "mirror_edge_refusals_total",
        kind = "counter",
        help = "Requests refused by the edge for a missing key, a limit, draining or overload.",
        labels = { "reason" },
    },
    {
        name = "mirror_edge_prompt_estimates_total",
        kind = "counter",
        help = "Prompt estimates by the part of the true count that they were wrong by, at most.",
        labels = { "error" },
    },
    {
        name = "mirror_edge_documents_refused_total",
        kind = "counter",
        help = "Policies, weight documents and key files refused; the old one stays.",
        labels = { "document" },
    },
    {
        name = "mirror_edge_dropped_samples_total",
        kind = "counter",
        help = "Samples that cost a series its place in the shared dict, or found none.",
        labels = {},
    },
}

local STATUSES = {}
for _, status in ipairs({
    200, 204, 206, 304, 400, 401, 403, 404, 405, 408, 411, 413, 414, 415, 416, 422, 429, 431, 499,
    500, 501, 502, 503, 504, 505,
}) do
    STATUSES[status] = tostring(status)
end

--- `dict`: a shared dict, or what has its methods.
function _M.new(dict)
    dict:add("mirror_edge_dropped_samples_total", 0)
    return setmetatable({ dict = dict }, Metrics)
end

--- Add to a counter; `key` is its name, or `name|label value|...`.
function Metrics:add(key, value)
    local total, _, has_evicted = self.dict:incr(key, value, 0)
    if not total or has_evicted then
        self.dict:incr("mirror_edge_dropped_samples_total", 1)
    end
end

--- Count a finished request; `class` and `tier` are nil for one that was never routed.
function Metrics:request(class, tier, status, seconds, received, sent)
    local labels = (class or "none") .. "|" .. (tier or "none")
    self:add("mirror_edge_requests_total|" .. labels .. "|" .. (STATUSES[status] or "other"), 1)
    self:add("mirror_edge_received_bytes_total", received)
    self:add("mirror_edge_sent_bytes_total", sent)
    if class then
        local index = #BUCKETS + 1
        for i, bound in ipairs(BUCKETS) do
            if seconds <= bound then
                index = i
                break
            end
        end
        self:add("mirror_edge_request_seconds|" .. labels .. "|" .. index, 1)
        self:add("mirror_edge_request_seconds|" .. labels .. "|sum", seconds)
    end
end

local function split(key)
    local parts = {}
    for part in key:gmatch("[^|]+") do
        parts[#parts + 1] = part
    end
    return table.remove(parts, 1), parts
end

local function label_text(names, values, extra)
    local pairs_text = {}
    for index, name in ipairs(names) do
        pairs_text[index] = format('%s="%s"', name, values[index])
    end
    pairs_text[#pairs_text + 1] = extra
    return #pairs_text > 0 and "{" .. concat(pairs_text, ",") .. "}" or ""
end

local function number_text(value)
    return format("%.14g", value)
end

local function histogram_lines(lines, family, dict, seen)
    for prefix, values in pairs(seen) do
        local total = 0
        for index = 1, #BUCKETS + 1 do
            total = total + (dict:get(prefix .. "|" .. index) or 0)
            local bound = BUCKETS[index] and number_text(BUCKETS[index]) or "+Inf"
            local labels = label_text(family.labels, values, format('le="%s"', bound))
            lines[#lines + 1] = family.name .. "_bucket" .. labels .. " " .. number_text(total)
        end
        local labels = label_text(family.labels, values)
        local sum = dict:get(prefix .. "|sum") or 0
        lines[#lines + 1] = family.name .. "_sum" .. labels .. " " .. number_text(sum)
        lines[#lines + 1] = family.name .. "_count" .. labels .. " " .. number_text(total)
    end
end

local function family_lines(lines, family, dict, keys)
    lines[#lines + 1] = "# HELP " .. family.name .. " " .. family.help
    lines[#lines + 1] = "# TYPE " .. family.name .. " " .. family.kind
    local series = {}
    for _, key in ipairs(keys) do
        local name, values = split(key)
        if name == family.name then
            if family.kind == "histogram" then
                series[key:match("^(.*)|")] = values
            else
                local labels = label_text(family.labels, values)
                lines[#lines + 1] = name .. labels .. " " .. number_text(dict:get(key) or 0)
            end
        end
    end
    histogram_lines(lines, family, dict, series)
    if #family.labels == 0 and not dict:get(family.name) then
        lines[#lines + 1] = family.name .. " 0"
    end
end

--- The Prometheus text. `gauges` is a list of `{name, help, samples}`, samples of `{labels, value}`
-- where labels is the text between the braces or nil.
function Metrics:text(gauges)
    local keys = self.dict:get_keys(0)
    table.sort(keys)
    local lines = {}
    for _, family in ipairs(FAMILIES) do
        family_lines(lines, family, self.dict, keys)
    end
    for _, gauge in ipairs(gauges) do
        lines[#lines + 1] = "# HELP " .. gauge.name .. " " .. gauge.help
        lines[#lines + 1] = "# TYPE " .. gauge.name .. " gauge"
        for _, sample in ipairs(gauge.samples) do
            local labels = sample[1] and "{" .. sample[1] .. "}" or ""
            lines[#lines + 1] = gauge.name .. labels .. " " .. number_text(sample[2])
        end
    end
    return concat(lines, "\n") .. "\n"
end

return _M

local fake_ngx = require("fake_ngx")
local metrics = require("mirror.metrics")
local ngx = ngx

local function has_line(text, line)
    return ("\n" .. text):find("\n" .. line .. "\n", 1, true) ~= nil
end

describe("metrics", function()
    local dict, m

    before_each(function()
        dict = fake_ngx.dict(ngx.now)
        m = metrics.new(dict)
    end)

    it("counts a request by class, tier and status", function()
        m:request("cpu", "standard", 200, 0.03, 100, 200)
        m:request("cpu", "standard", 200, 0.2, 100, 200)
        m:request(nil, nil, 404, 0, 10, 20)
        local text = m:text({})
        local name = "mirror_edge_requests_total"
        assert.is_true(has_line(text, name .. '{class="cpu",tier="standard",status="200"} 2'))
        assert.is_true(has_line(text, name .. '{class="none",tier="none",status="404"} 1'))
        assert.is_true(has_line(text, "mirror_edge_received_bytes_total 210"))
        assert.is_true(has_line(text, "mirror_edge_sent_bytes_total 420"))
    end)

    it("gives a cumulative histogram whose last bucket is the count", function()
        m:request("cpu", "standard", 200, 0.005, 0, 0)
        m:request("cpu", "standard", 200, 0.3, 0, 0)
        m:request("cpu", "standard", 200, 3600, 0, 0)
        local text = m:text({})
        local name, labels = "mirror_edge_request_seconds", 'class="cpu",tier="standard"'
        local expected = { ["0.005"] = 1, ["0.25"] = 1, ["0.5"] = 2, ["60"] = 2, ["+Inf"] = 3 }
        for bound, count in pairs(expected) do
            local line = string.format('%s_bucket{%s,le="%s"} %d', name, labels, bound, count)
            assert.is_true(has_line(text, line), line)
        end
        assert.is_true(has_line(text, name .. "_count{" .. labels .. "} 3"))
        assert.is_true(has_line(text, name .. "_sum{" .. labels .. "} 3600.305"))
    end)

    it("leaves requests that were never routed out of the histogram", function()
        m:request(nil, nil, 404, 1, 0, 0)
        assert.is_nil(m:text({}):find("mirror_edge_request_seconds_bucket", 1, true))
    end)

    it("puts unknown statuses into one series", function()
        for status = 600, 999 do
            m:request("cpu", "standard", status, 1, 0, 0)
        end
        local line = 'mirror_edge_requests_total{class="cpu",tier="standard",status="other"} 400'
        assert.is_true(has_line(m:text({}), line))
    end)

    it("shows counters that nothing was added to", function()
        assert.is_true(has_line(m:text({}), "mirror_edge_retries_total 0"))
    end)

    it("adds gauges with and without labels", function()
        local text = m:text({
            { name = "g", help = "H.", samples = { { 'state="active"', 3 } } },
            { name = "h", help = "H.", samples = { { nil, 1 } } },
        })
        assert.is_true(has_line(text, 'g{state="active"} 3'))
        assert.is_true(has_line(text, "# TYPE h gauge"))
        assert.is_true(has_line(text, "h 1"))
    end)

    it("counts what a full dict has no room for", function()
        local small = fake_ngx.dict(ngx.now, 1)
        m = metrics.new(small)
        m:request("cpu", "standard", 200, 1, 10, 20)
        assert.is_true(has_line(m:text({}), "mirror_edge_dropped_samples_total 5"))
    end)
end)

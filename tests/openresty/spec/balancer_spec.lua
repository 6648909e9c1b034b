local balancer = require("mirror.balancer")
local fake_ngx = require("fake_ngx")
local in_flight = require("mirror.in_flight")
local ngx = ngx

local PEERS = { "unix:/a.sock", "unix:/b.sock", "unix:/c.sock" }

local function flight_of(dict, pid)
    return in_flight.new(dict, function()
        return pid
    end)
end

describe("balancer", function()
    local dict, flight, peers

    before_each(function()
        dict = fake_ngx.dict(ngx.now)
        flight = flight_of(dict, 41)
        peers = balancer.new(PEERS, flight, dict)
    end)

    it("picks the peer with fewest in flight", function()
        peers:acquire(PEERS[1])
        peers:acquire(PEERS[3])
        assert.equal(PEERS[2], peers:pick())
    end)

    it("takes turns among equals", function()
        local seen = {}
        for _ = 1, 6 do
            local peer = peers:pick()
            seen[peer] = (seen[peer] or 0) + 1
        end
        assert.same({ [PEERS[1]] = 2, [PEERS[2]] = 2, [PEERS[3]] = 2 }, seen)
    end)

    it("keeps the difference within one when each pick is acquired", function()
        for _ = 1, 20 do
            peers:acquire(peers:pick())
        end
        for _, peer in ipairs(PEERS) do
            assert.is_true(peers:in_flight(peer) >= 6 and peers:in_flight(peer) <= 7)
        end
    end)

    it("returns to zero when all is released", function()
        for _ = 1, 9 do
            peers:acquire(peers:pick())
        end
        for _, peer in ipairs(PEERS) do
            for _ = 1, 3 do
                peers:release(peer)
            end
            assert.equal(0, peers:in_flight(peer))
        end
    end)

    it("does not pick a peer that this request has tried", function()
        for _ = 1, 9 do
            assert.equal(PEERS[2], peers:pick({ PEERS[1], PEERS[3] }))
        end
    end)

    it("picks a tried peer rather than none", function()
        assert.is_string(peers:pick(PEERS))
    end)

    it("avoids a failed peer for a second, even an idle one", function()
        peers:acquire(PEERS[2])
        peers:acquire(PEERS[3])
        peers:fail(PEERS[1])
        for _ = 1, 9 do
            assert.not_equal(PEERS[1], peers:pick())
        end
        ngx.advance(balancer.DOWN_S + 0.1)
        assert.equal(PEERS[1], peers:pick())
    end)

    it("allows three tries at most and two for a lone peer", function()
        assert.equal(2, peers:retries())
        assert.equal(1, balancer.new({ PEERS[1] }, flight, dict):retries())
        assert.equal(2, balancer.new({ PEERS[1], PEERS[2] }, flight, dict):retries())
    end)

    it("shares its counts with the other workers", function()
        local other = balancer.new(PEERS, flight_of(dict, 42), dict)
        other:acquire(PEERS[1])
        assert.equal(1, peers:in_flight(PEERS[1]))
    end)
end)

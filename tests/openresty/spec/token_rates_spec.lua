local contract = require("contract")
local fake_ngx = require("fake_ngx")
local policy = require("mirror.policy")
local prompt_estimate = require("mirror.prompt_estimate")
local token_rates = require("mirror.token_rates")
local ngx = ngx

-- Tokens of a body, as a model counts that has so many a byte.
local function counted(ascii, other)
    return math.ceil(0.22 * ascii + 0.6 * other)
end

describe("token rates", function()
    local dict, rates

    before_each(function()
        dict = fake_ngx.dict(ngx.now)
        rates = token_rates.new(dict, { "m", "other" })
    end)

    local function learn(model, count)
        for index = 1, count do
            local ascii, other = 100 + 37 * index % 900, index % 3 == 0 and 210 or 0
            rates:learn(model, ascii, other, counted(ascii, other), policy)
        end
    end

    it("are the policy's until something is learned", function()
        assert.same({ 0.3, 0.2 }, { rates:of("m", policy) })
    end)

    it("approach the true ones within 50 requests, for all workers", function()
        learn("m", 50)
        local ascii, other = token_rates.new(dict, { "m", "other" }):of("m", policy)
        assert.is_true(math.abs(ascii - 0.22) < 0.01, ascii)
        assert.is_true(math.abs(other - 0.6) < 0.06, other)
    end)

    it("are kept by model", function()
        learn("m", 20)
        assert.same({ 0.3, 0.2 }, { rates:of("other", policy) })
    end)

    it("are kept for the models that are served, whatever names clients make up", function()
        learn("m", 50)
        for index = 1, 500 do
            rates:learn("made up " .. index, 4000, 0, 40, policy)
        end
        assert.is_true(#dict:get_keys() < 10, #dict:get_keys())
        assert.is_true(math.abs(rates:of("m", policy) - 0.22) < 0.01)
        assert.equal(rates:of(nil, policy), (rates:of("made up 1", policy)))
    end)

    it("are not spoiled by a few odd bodies", function()
        learn("m", 50)
        for _ = 1, 3 do
            rates:learn("m", 4000, 0, 4000, policy)
            rates:learn("m", 5, 0, 4000, policy)
        end
        learn("m", 10)
        local ascii = rates:of("m", policy)
        assert.is_true(math.abs(ascii - 0.22) < 0.05, ascii)
    end)

    it("are not made sure of themselves by an odd first body", function()
        rates:learn("m", 60, 0, 1, policy)
        rates:learn("m", 0, 6, 3000, policy)
        learn("m", 50)
        local ascii, other = rates:of("m", policy)
        assert.is_true(math.abs(ascii - 0.22) < 0.01, ascii)
        assert.is_true(math.abs(other - 0.6) < 0.06, other)
    end)

    local function is_near(ascii, tokens)
        local estimate = prompt_estimate.tokens(ascii, 0, rates:of("m", policy))
        return math.abs(estimate - tokens) <= 0.25 * tokens
    end

    it("follow within 20 requests when prompts of one token give way to longer ones", function()
        for _ = 1, 1000 do
            rates:learn("m", 90, 0, 1, policy)
        end
        for _ = 1, 20 do
            rates:learn("m", 560, 0, 101, policy)
        end
        assert.is_true(is_near(560, 101))
    end)

    it("are right for others while every third prompt has one token", function()
        local near = 0
        for index = 1, 600 do
            local words = 50 + 37 * index % 1900
            if index > 300 then
                near = near + (is_near(90 + 5 * words, words) and 1 or 0)
            end
            rates:learn("m", 90 + 5 * words, 0, words, policy)
            if index % 2 == 0 then
                rates:learn("m", 90, 0, 1, policy)
            end
        end
        assert.is_true(near >= 270, near)
    end)

    it("approach those of a model that is far from the policy's", function()
        for index = 1, 100 do
            rates:learn("m", 100 + 10 * index, 0, 2 * (100 + 10 * index), policy)
            rates:learn("n", 100 + 10 * index, 0, 0.02 * (100 + 10 * index), policy)
        end
        assert.is_true(math.abs(rates:of("m", policy) - 2) < 0.1)
        assert.is_true(math.abs(rates:of("n", policy) - 0.02) < 0.001)
    end)

    it("stay finite and positive whatever is taught", function()
        math.randomseed(3)
        for _ = 1, 3000 do
            local size = 10 ^ math.random(0, 7)
            rates:learn("m", math.random(0, 1) * size, math.random(0, 1) * size,
                math.floor(10 ^ math.random(0, 7)), policy)
        end
        for _, rate in ipairs({ rates:of("m", policy) }) do
            assert.is_true(rate >= 0.01 and rate <= 4)
        end
        learn("m", 1000)
        local ascii, other = rates:of("m", policy)
        assert.is_true(math.abs(ascii - 0.22) < 0.03, ascii)
        assert.is_true(math.abs(other - 0.6) < 0.1, other)
    end)

    local counts = contract.read("prompt_counts")
    for seed = 1, 4 do
        it("give 9 of 10 estimates within 25 % after 50 requests, order " .. seed, function()
            rates:learn(counts.model, 90, 0, 1, policy)
            math.randomseed(seed)
            local bodies = counts.bodies
            for index = #bodies, 2, -1 do
                local other = math.random(index)
                bodies[index], bodies[other] = bodies[other], bodies[index]
            end
            local within, judged = 0, 0
            for index, body in ipairs(bodies) do
                local ascii, other, tokens = unpack(body)
                local estimate =
                    prompt_estimate.tokens(ascii, other, rates:of(counts.model, policy))
                if index > 50 then
                    judged = judged + 1
                    within = within + (math.abs(estimate - tokens) <= 0.25 * tokens and 1 or 0)
                end
                rates:learn(counts.model, ascii, other, tokens, policy)
            end
            assert.is_true(within >= 0.9 * judged, within .. " of " .. judged)
        end)
    end
end)

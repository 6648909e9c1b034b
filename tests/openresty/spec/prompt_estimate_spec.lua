local contract = require("contract")
local policy = require("mirror.policy")
local prompt_estimate = require("mirror.prompt_estimate")

local function tokens(text)
    local ascii, non_ascii = prompt_estimate.bytes(text, #text)
    return prompt_estimate.tokens(
        ascii, non_ascii, policy.tokens_per_ascii_byte, policy.tokens_per_non_ascii_byte
    )
end

describe("prompt estimate", function()
    for _, case in ipairs(contract.read("prompt_estimate").cases) do
        it("holds its bounds for " .. case.name, function()
            local text = case.text:rep(case["repeat"] or 1)
            local ascii, non_ascii = prompt_estimate.count(text)
            assert.equal(case.ascii_bytes * (case["repeat"] or 1), ascii)
            assert.equal(case.non_ascii_bytes * (case["repeat"] or 1), non_ascii)
            local estimate = tokens(text)
            assert.is_true(estimate >= case.at_least, estimate .. " is too few")
            assert.is_true(estimate <= case.at_most, estimate .. " is too many")
        end)
    end

    it("is a whole number of at least 1", function()
        assert.equal(1, tokens(""))
        assert.equal(1, tokens("a"))
        assert.equal(0, tokens("abcdefghijk") % 1)
    end)

    it("counts a JSON escape like the character itself", function()
        local character, escape = ("你"):rep(100), ("\\u4f60"):rep(100)
        assert.equal(tokens(character), tokens(escape))
    end)

    it("judges a large body by its beginning", function()
        local sample = ("a"):rep(prompt_estimate.SAMPLE_BYTES)
        assert.equal(10 * #sample, (prompt_estimate.bytes(sample, 10 * #sample)))
        local ascii, non_ascii = prompt_estimate.bytes(sample .. "你好", 10 * #sample)
        assert.same({ 10 * #sample, 0 }, { ascii, non_ascii })
    end)

    local bodies = {
        { '{"model": "m-1", "messages": []}', "m-1" },
        { '{"messages": [{"content": "a \\"model\\": \\"b\\""}], "model":"org/m"}', "org/m" },
        { '{"messages": []}', nil },
        { '{"model": 7}', nil },
        { '{"model"', nil },
        { "", nil },
    }
    for _, case in ipairs(bodies) do
        it("finds the model " .. tostring(case[2]) .. " in " .. case[1], function()
            assert.equal(case[2], prompt_estimate.model(case[1]))
        end)
    end

    it("takes any bytes", function()
        local bytes = {}
        for byte = 0, 255 do
            bytes[#bytes + 1] = string.char(byte)
        end
        assert.equal(128, (prompt_estimate.count(table.concat(bytes))))
    end)
end)

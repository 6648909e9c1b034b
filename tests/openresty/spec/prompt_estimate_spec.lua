local contract = require("contract")
local policy = require("mirror.policy")
local prompt_estimate = require("mirror.prompt_estimate")

local function tokens(text)
    return prompt_estimate.tokens(text, #text, policy.default)
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
        local ten_times = prompt_estimate.tokens(sample, 10 * #sample, policy.default)
        assert.is_true(math.abs(ten_times - 10 * tokens(sample)) <= 10)
        local with_more = prompt_estimate.tokens(sample .. "你好", 10 * #sample, policy.default)
        assert.equal(ten_times, with_more)
    end)

    it("takes any bytes", function()
        local bytes = {}
        for byte = 0, 255 do
            bytes[#bytes + 1] = string.char(byte)
        end
        assert.equal(128, (prompt_estimate.count(table.concat(bytes))))
    end)
end)

local contract = require("contract")
local event_stream = require("mirror.event_stream")

local STREAM = 'data: {"text": "你好"}\n\n: ping\n\ndata: {"text": "a\\n\\nb"}\n\ndata: [DONE]\n\n'

describe("event stream", function()
    it("passes whole events untouched", function()
        local stream = event_stream.new()
        assert.equal("data: 1\n\n", (stream:pass("data: 1\n\n", false)))
        assert.equal("", (stream:pass("", true)))
    end)

    it("is the same text wherever nginx cuts it, and sends whole events only", function()
        for first = 0, #STREAM do
            for second = first, #STREAM, 7 do
                local stream, sent = event_stream.new(), {}
                local pieces = {
                    STREAM:sub(1, first), STREAM:sub(first + 1, second), STREAM:sub(second + 1),
                }
                for _, piece in ipairs(pieces) do
                    if piece ~= "" then
                        local text, is_lost = stream:pass(piece, false)
                        assert.is_false(is_lost)
                        assert.is_true(text == "" or text:sub(-2) == "\n\n")
                        sent[#sent + 1] = text
                    end
                end
                sent[#sent + 1] = stream:pass("", true)
                assert.equal(STREAM, table.concat(sent))
            end
        end
    end)

    it("takes an empty first chunk for the flush of the headers", function()
        local stream = event_stream.new()
        local _, is_lost = stream:pass("", false)
        assert.is_false(is_lost)
        _, is_lost = stream:pass("data: 1\n\n", false)
        assert.is_false(is_lost)
    end)

    it("takes a later empty chunk for the loss of the gateway", function()
        local stream = event_stream.new()
        stream:pass("data: 1\n\ndata: ha", false)
        local text, is_lost = stream:pass("", false)
        assert.is_true(is_lost)
        assert.equal("", text)
    end)

    it("notices a loss right after the headers", function()
        local stream = event_stream.new()
        stream:pass("", false)
        local _, is_lost = stream:pass("", false)
        assert.is_true(is_lost)
    end)

    it("sends an unfinished event where the stream ends well", function()
        local stream = event_stream.new()
        assert.equal("", (stream:pass("data: 1", false)))
        assert.equal("data: 1", (stream:pass("", true)))
    end)

    local counts = contract.read("edge_headers").counts.stream_end

    it("keeps the gateway's counts to itself wherever nginx cuts the end", function()
        for cut = 0, #counts.text do
            local stream = event_stream.new()
            local sent = stream:pass("data: 1\n\n" .. counts.text:sub(1, cut), false)
            if cut < #counts.text then
                sent = sent .. stream:pass(counts.text:sub(cut + 1), false)
            end
            sent = sent .. stream:pass("", true)
            assert.equal("data: 1\n\n" .. counts.client_sees, sent)
            assert.equal(counts.prompt, stream.prompt_tokens)
            assert.equal(counts.completion, stream.completion_tokens)
        end
    end)

    it("keeps them to itself in a last chunk too", function()
        local stream = event_stream.new()
        assert.equal(counts.client_sees, (stream:pass(counts.text, true)))
    end)

    it("passes text that only looks like counts", function()
        local stream = event_stream.new()
        local text = 'data: ": mirror-usage 1 2"\n\n: 5\n\n'
        assert.equal(text, (stream:pass(text, false)))
        assert.is_nil(stream.prompt_tokens)
    end)
end)

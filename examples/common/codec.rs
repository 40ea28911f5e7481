//! Text to tokens and back: by a model's own tokenizer, or byte by byte.

use super::text::about;
use candle_core::{bail, Error, Result};
use std::path::Path;
use tokenizers::Tokenizer;

/// How a model reads and writes text.
pub enum Codec {
    /// A token is a byte.
    Bytes,
    /// The tokenizer of a `tokenizer.json`.
    Tokenizer(Box<Tokenizer>),
}

impl Codec {
    /// The tokenizer where the model has one, else bytes.
    ///
    /// # Errors
    /// When the tokenizer cannot be read, or there is none and the vocabulary is not that of bytes.
    pub fn open(tokenizer: Option<&Path>, vocab_size: usize) -> Result<Self> {
        match tokenizer {
            Some(path) => match whole_text_tokenizer(path) {
                Ok(tokenizer) => Ok(Self::Tokenizer(Box::new(tokenizer))),
                Err(error) => Err(about(path, error)),
            },
            None if vocab_size == 256 => Ok(Self::Bytes),
            None => bail!("the model has no tokenizer.json, and its vocabulary of {vocab_size} is not that of bytes"),
        }
    }

    /// The tokens of a text, with those that the tokenizer puts around it.
    ///
    /// # Errors
    /// When the tokenizer has no token for a part of it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Self::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Self::Tokenizer(tokenizer) => match tokenizer.encode(text, true) {
                Ok(encoding) => Ok(encoding.get_ids().to_vec()),
                Err(error) => Err(Error::msg(format!("tokenizer: {error}"))),
            },
        }
    }

    /// Reads tokens one by one, which follow those of `before`.
    pub fn decoder(&self, before: &[u32]) -> Decoder<'_> {
        match self {
            Self::Bytes => Decoder::Bytes(Vec::new()),
            Self::Tokenizer(tokenizer) => Decoder::Tokenizer {
                tokenizer,
                tokens: before.to_vec(),
                read: before.len(),
            },
        }
    }
}

/// Text from tokens as they come, in whole characters: one that is spread over tokens appears with its last.
pub enum Decoder<'a> {
    /// The bytes of a character that has begun.
    Bytes(Vec<u8>),
    Tokenizer {
        tokenizer: &'a Tokenizer,
        /// The last ones. A token's text can depend on those before it, so some that were read stay.
        tokens: Vec<u32>,
        /// How many of them were read.
        read: usize,
    },
}

/// A character has at most so many bytes, so it ends within as many tokens.
const LONGEST_CHARACTER: usize = 4;

impl Decoder<'_> {
    /// The text that this token completes. What is no character becomes U+FFFD.
    ///
    /// # Errors
    /// When the token is no byte, or the tokenizer fails.
    pub fn push(&mut self, token: u32) -> Result<String> {
        match self {
            Self::Bytes(bytes) => {
                let Ok(byte) = u8::try_from(token) else {
                    bail!("token {token} is no byte")
                };
                bytes.push(byte);
                Ok(take_characters(bytes))
            }
            Self::Tokenizer {
                tokenizer,
                tokens,
                read,
            } => {
                tokens.push(token);
                let (before, after) =
                    (text(tokenizer, &tokens[..*read])?, text(tokenizer, tokens)?);
                let unfinished = after.ends_with(char::REPLACEMENT_CHARACTER)
                    && tokens.len() - *read < LONGEST_CHARACTER;
                if unfinished || after.len() <= before.len() {
                    return Ok(String::new());
                }
                tokens.drain(..*read);
                *read = tokens.len();
                Ok(behind(&before, &after))
            }
        }
    }

    /// What has begun and was never completed.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn finish(self) -> Result<String> {
        match self {
            Self::Bytes(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Self::Tokenizer {
                tokenizer,
                tokens,
                read,
            } => Ok(behind(
                &text(tokenizer, &tokens[..read])?,
                &text(tokenizer, &tokens)?,
            )),
        }
    }
}

/// Some are saved as training used them, to cut texts or to fill them up.
fn whole_text_tokenizer(path: &Path) -> tokenizers::Result<Tokenizer> {
    let mut tokenizer = Tokenizer::from_file(path)?;
    tokenizer.with_truncation(None)?;
    tokenizer.with_padding(None);
    Ok(tokenizer)
}

fn text(tokenizer: &Tokenizer, tokens: &[u32]) -> Result<String> {
    let decoded = tokenizer.decode(tokens, true);
    decoded.map_err(|error| Error::msg(format!("tokenizer: {error}")))
}

/// What `after` has more than `before`, with which it begins but for broken characters.
fn behind(before: &str, after: &str) -> String {
    let same = before
        .chars()
        .zip(after.chars())
        .take_while(|(a, b)| a == b);
    after.chars().skip(same.count()).collect()
}

/// Takes the text from the front of `bytes` and leaves a character that can still become whole.
fn take_characters(bytes: &mut Vec<u8>) -> String {
    let (mut text, mut taken) = (String::new(), 0);
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        taken += chunk.valid().len();
        let broken = chunk.invalid();
        let at_the_end = taken + broken.len() == bytes.len();
        // An error without a length: the character has begun and not ended.
        let begun = std::str::from_utf8(broken).is_err_and(|error| error.error_len().is_none());
        if broken.is_empty() || at_the_end && begun {
            break;
        }
        text.push(char::REPLACEMENT_CHARACTER);
        taken += broken.len();
    }
    bytes.drain(..taken);
    text
}

/// Text that leaves a terminal as it was.
pub fn printable(text: &str) -> String {
    let shown = |c: char| matches!(c, '\n' | '\t') || !c.is_control();
    text.replace(|c| !shown(c), "\u{fffd}")
}

/// A tokenizer of 258 tokens for tests: two merges over bytes; "é" and "€" stay in two and three tokens.
#[cfg(test)]
pub fn byte_pairs() -> Tokenizer {
    use tokenizers::decoders::byte_level::ByteLevel;
    use tokenizers::models::bpe::BPE;
    let vocabulary = ByteLevel::alphabet()
        .into_iter()
        .map(String::from)
        .chain(["ab".into(), "Ġab".into()]);
    let mut names: Vec<_> = vocabulary.collect();
    names.sort();
    let vocabulary: Vec<(String, u32)> = names.into_iter().zip(0..).collect();
    let vocabulary: [_; 258] = vocabulary.try_into().unwrap();
    let merges = [("a", "b"), ("Ġ", "ab")].map(|(a, b)| (a.to_string(), b.to_string()));
    let model = BPE::builder()
        .vocab_and_merges(vocabulary, merges.to_vec())
        .build()
        .unwrap();
    let mut tokenizer = Tokenizer::new(model);
    let level = ByteLevel::new(false, true, true);
    tokenizer.with_pre_tokenizer(Some(level));
    tokenizer.with_decoder(Some(level));
    tokenizer
}

#[cfg(test)]
mod tests {
    use super::*;
    fn tokenizer() -> Codec {
        Codec::Tokenizer(Box::new(byte_pairs()))
    }

    #[test]
    fn text_of_tokens_one_by_one_is_the_text_and_comes_in_whole_characters() -> Result<()> {
        let text = "ab ab\n– é €𝄞 \u{301}ab";
        for codec in [Codec::Bytes, tokenizer()] {
            let mut decoder = codec.decoder(&[]);
            let mut found = String::new();
            for token in codec.encode(text)? {
                let part = decoder.push(token)?;
                assert!(!part.contains('\u{fffd}'), "{part:?} behind {found:?}");
                found += &part;
            }
            assert_eq!(found + &decoder.finish()?, text);
        }
        assert!(tokenizer().encode(text)?.len() < text.len());
        Ok(())
    }

    #[test]
    fn text_behind_a_prompt_keeps_the_space_that_begins_it_and_no_text_is_cut_or_filled_up(
    ) -> Result<()> {
        // As LLaMA 2 has it: a space before every word, and none at the beginning of what is decoded.
        let file = serde_json::json!({
            "version": "1.0",
            "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
            "padding": {
                "strategy": {"Fixed": 6}, "direction": "Right", "pad_to_multiple_of": null,
                "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"
            },
            "added_tokens": [], "normalizer": null, "post_processor": null,
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}
            ]},
            "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "▁ab": 1, "▁c": 2}, "unk_token": "<unk>"}
        });
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, file.to_string())?;
        let codec = Codec::open(Some(&path), 3)?;
        assert_eq!(codec.encode("ab c ab")?, [1, 2, 1]);
        for (before, expected) in [(&[][..], "c ab"), (&[1], " c ab"), (&[2, 2], " c ab")] {
            let mut decoder = codec.decoder(before);
            let mut found = decoder.push(2)?;
            found += &decoder.push(1)?;
            assert_eq!(found + &decoder.finish()?, expected, "behind {before:?}");
        }
        Ok(())
    }

    #[test]
    fn broken_characters_are_shown_as_such_and_the_next_ones_are_whole() -> Result<()> {
        let mut decoder = Codec::Bytes.decoder(&[]);
        let parts: Vec<String> = [b'a', 0xff, 0xe2, 0x82, b'b', 0xc3, 0xa9, 0xe2]
            .iter()
            .map(|byte| decoder.push(u32::from(*byte)))
            .collect::<Result<_>>()?;
        assert_eq!(parts, ["a", "\u{fffd}", "", "", "\u{fffd}b", "", "é", ""]);
        assert_eq!(decoder.finish()?, "\u{fffd}");
        assert!(Codec::Bytes.decoder(&[]).push(256).is_err());

        // Broken bytes without end: they do not hold the text back for ever.
        let codec = tokenizer();
        let Codec::Tokenizer(inner) = &codec else {
            bail!("a tokenizer")
        };
        let (a, lead) = (inner.token_to_id("a"), inner.token_to_id("â"));
        let mut decoder = codec.decoder(&[]);
        let mut found = String::new();
        for token in [a, lead, lead, lead, lead, lead, lead, a]
            .into_iter()
            .flatten()
        {
            found += &decoder.push(token)?;
        }
        found += &decoder.finish()?;
        assert_eq!(found, format!("a{}a", "\u{fffd}".repeat(6)));
        Ok(())
    }

    #[test]
    fn model_without_a_tokenizer_and_a_vocabulary_of_bytes_is_refused() {
        assert!(matches!(Codec::open(None, 256), Ok(Codec::Bytes)));
        let error = Codec::open(None, 32_000).err().map(|e| e.to_string());
        assert!(error.is_some_and(|e| e.contains("32000")));
        let error = Codec::open(Some(Path::new("no such.json")), 256).err();
        assert!(error.is_some_and(|e| e.to_string().contains("no such.json")));
    }

    #[test]
    fn printable_control_characters_replaced() {
        assert_eq!(printable("a\x1b[b\tc\n"), "a\u{fffd}[b\tc\n");
    }
}

//! JSON as it comes from elsewhere: parsed without ambiguity, read field by field.

use candle_core::{bail, Error, Result};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Most bytes of a document; the safetensors library has the same bound for a header.
pub(crate) const LONGEST: u64 = 100_000_000;

/// Parses a document. A name given twice in one object is an error: which of the two counts would depend on the
/// program that reads it.
pub(crate) fn parse(text: &[u8]) -> Result<Value> {
    match serde_json::from_slice::<Unambiguous>(text) {
        Ok(Unambiguous(value)) => Ok(value),
        Err(error) => bail!("not valid JSON: {error}"),
    }
}

/// Reads a file.
pub(crate) fn read(path: &Path) -> Result<Value> {
    let mut text = Vec::new();
    File::open(path)?.take(LONGEST + 1).read_to_end(&mut text)?;
    if text.len() as u64 > LONGEST {
        bail!("is longer than {LONGEST} bytes")
    }
    parse(&text)
}

/// A value as an error message shows it, not longer than a line.
pub(crate) fn brief(value: &Value) -> String {
    const LONGEST: usize = 120;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// The first place at which two values differ, and what stands there.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    pub place: String,
    pub one: String,
    pub other: String,
}

/// The fields by which an object says what kind of thing it is.
const KINDS: [&str; 3] = ["type", "table", "rope_type"];

/// The first place at which two values differ; within an object the fields that say its [kind](KINDS) come first. Numbers
/// are compared by what they are, 2 and 2.0 being one. `place` is where the two stand.
pub(crate) fn difference(place: &str, one: &Value, other: &Value) -> Option<Difference> {
    if let (Value::Object(a), Value::Object(b)) = (one, other) {
        let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
        let is_kind = |name: &&&String| KINDS.contains(&name.as_str());
        let kinds = names.iter().filter(is_kind);
        let others = names.iter().filter(|name| !is_kind(name));
        return kinds.chain(others).find_map(|name| {
            let dot = if place.is_empty() { "" } else { "." };
            let place = format!("{place}{dot}{name}");
            match (a.get(*name), b.get(*name)) {
                (Some(one), Some(other)) => difference(&place, one, other),
                (one, other) => {
                    let shown = |x: Option<&Value>| x.map_or("absent".to_string(), brief);
                    Some(Difference {
                        place,
                        one: shown(one),
                        other: shown(other),
                    })
                }
            }
        });
    }
    if let (Value::Array(a), Value::Array(b)) = (one, other) {
        if a.len() == b.len() {
            let mut pairs = a.iter().zip(b).enumerate();
            return pairs
                .find_map(|(i, (one, other))| difference(&format!("{place}[{i}]"), one, other));
        }
    }
    let same = match (one, other) {
        (Value::Number(a), Value::Number(b)) if a.is_f64() != b.is_f64() => {
            a.as_f64() == b.as_f64()
        }
        _ => one == other,
    };
    (!same).then(|| Difference {
        place: place.to_string(),
        one: brief(one),
        other: brief(other),
    })
}

/// How many arrays and objects are within each other.
pub(crate) fn depth(value: &Value) -> usize {
    // Not by recursion: a value made in memory may be of any depth.
    let (mut deepest, mut left) = (0, vec![(value, 1)]);
    while let Some((value, level)) = left.pop() {
        let mut within = |value| left.push((value, level + 1));
        match value {
            Value::Array(values) => values.iter().for_each(&mut within),
            Value::Object(map) => map.values().for_each(&mut within),
            _ => continue,
        }
        deepest = deepest.max(level);
    }
    deepest
}

/// The same with the names of every object in order, whatever order serde_json was built to keep.
pub(crate) fn sorted(value: &Value) -> Value {
    match value {
        Value::Array(values) => values.iter().map(sorted).collect(),
        Value::Object(map) => {
            let in_order: BTreeMap<_, _> = map.iter().collect();
            let pairs = in_order
                .into_iter()
                .map(|(name, x)| (name.clone(), sorted(x)));
            Value::Object(pairs.collect())
        }
        other => other.clone(),
    }
}

struct Unambiguous(Value);

impl<'de> Deserialize<'de> for Unambiguous {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(Builder).map(Self)
    }
}

struct Builder;

impl<'de> Visitor<'de> for Builder {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(Unambiguous(value)) = seq.next_element()? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Value, A::Error> {
        let mut values = Map::new();
        while let Some(name) = map.next_key::<String>()? {
            if values.contains_key(&name) {
                return Err(A::Error::custom(format!("{name:?} is given twice")));
            }
            let Unambiguous(value) = map.next_value()?;
            values.insert(name, value);
        }
        Ok(Value::Object(values))
    }
}

/// An object, read field by field; null is absence.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    /// What errors begin with.
    subject: &'static str,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The fields of an object that errors call `name`.
    pub fn of(subject: &'static str, value: &'a Value, name: &str) -> Result<Self> {
        match value {
            Value::Object(map) => Ok(Self { subject, map }),
            other => bail!("{subject}: {name} must be an object, got {}", brief(other)),
        }
    }

    /// The fields of a map.
    pub fn in_map(subject: &'static str, map: &'a Map<String, Value>) -> Self {
        Self { subject, map }
    }

    /// All of them, those that are null too.
    pub fn all(&self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        self.map.iter()
    }

    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    pub fn number(&self, name: &str) -> Result<Option<f64>> {
        self.read(name, "a number", Value::as_f64)
    }

    /// A size, or a count of tokens; some files write 8192.0.
    pub fn count(&self, name: &str) -> Result<Option<usize>> {
        self.read(name, "a whole number", |value| {
            if let Some(count) = value.as_u64() {
                return usize::try_from(count).ok();
            }
            let number = value.as_f64()?;
            let whole = number >= 0. && number.fract() == 0. && number < (1u64 << 53) as f64;
            whole.then_some(number as usize)
        })
    }

    pub fn numbers(&self, name: &str) -> Result<Option<Vec<f64>>> {
        self.read(name, "a list of numbers", |value| {
            value.as_array()?.iter().map(Value::as_f64).collect()
        })
    }

    pub fn flag(&self, name: &str) -> Result<Option<bool>> {
        self.read(name, "true or false", Value::as_bool)
    }

    pub fn text(&self, name: &str) -> Result<Option<&'a str>> {
        self.read(name, "a name", Value::as_str)
    }

    pub fn required<T>(&self, name: &str, value: Option<T>) -> Result<T> {
        match value {
            Some(value) => Ok(value),
            None => Err(Error::msg(format!(
                "{}: {name} is missing among {}",
                self.subject,
                brief(&Value::Object(self.map.clone()))
            ))),
        }
    }

    pub fn read<T>(
        &self,
        name: &str,
        kind: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => match read(value) {
                None => bail!(
                    "{}: {name} must be {kind}, got {}",
                    self.subject,
                    brief(value)
                ),
                some => Ok(some),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn difference_names_the_first_place() {
        let one = json!({"a": 1, "b": {"c": [1, 2], "d": null}, "e": [1]});
        assert_eq!(difference("", &one, &one), None);
        let of = |other: Value| {
            let Difference { place, one, other } = difference("", &one, &other).unwrap();
            format!("{place}: {one}, {other}")
        };
        let (b, e) = (json!({"c": [1, 2], "d": null}), json!([1]));
        assert_eq!(of(json!({"a": 1, "b": {"c": [1, 3]}})), "b.c[1]: 2, 3");
        assert_eq!(of(json!({"a": 1, "b": b, "e": [1, 2]})), "e: [1], [1,2]");
        assert_eq!(
            of(json!({"a": 1, "b": {"c": [1, 2]}, "e": e})),
            "b.d: null, absent"
        );
        assert_eq!(
            of(json!({"a": 1, "b": b, "e": e, "f": null})),
            "f: absent, null"
        );
        // Kinds come first: their other fields have little to do with each other.
        let (one, other) = (json!({"type": "x", "a": 1}), json!({"type": "y", "a": 2}));
        assert_eq!(difference("at", &one, &other).unwrap().place, "at.type");
        assert_eq!(difference("", &json!([2, -1]), &json!([2.0, -1.0])), None);
        assert!(difference("", &json!(2), &json!(2.5)).is_some());
        let long = json!("x".repeat(500));
        assert!(difference("", &long, &one).unwrap().one.len() < 200);
    }

    #[test]
    fn depth_counts_what_is_within_each_other() {
        for (value, levels) in [
            (json!(1), 0),
            (json!([]), 1),
            (json!({"a": [1, {"b": 2}], "c": []}), 3),
        ] {
            assert_eq!(depth(&value), levels, "{value}");
        }
    }

    #[test]
    fn sorted_values_have_their_names_in_order() {
        let value = json!([{"b": 1, "a": {"d": [null], "c": 2}}]);
        assert_eq!(sorted(&value), value);
        assert_eq!(
            sorted(&value).to_string(),
            r#"[{"a":{"c":2,"d":[null]},"b":1}]"#
        );
    }

    #[test]
    fn parse_gives_what_serde_json_gives() {
        let text =
            r#"{"a": [1, -2, 0.1, 1e300, true, null, "é\n"], "b": {"c": 18446744073709551615}}"#;
        let expected: Value = serde_json::from_str(text).unwrap();
        assert_eq!(parse(text.as_bytes()).unwrap(), expected);
    }

    #[test]
    fn parse_of_a_name_given_twice_is_refused_at_any_depth() {
        for text in [r#"{"a": 1, "a": 1}"#, r#"[{"b": {"a": 1, "a": 2}}]"#] {
            let error = parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains("\"a\" is given twice"), "{error}");
        }
    }

    #[test]
    fn parse_of_what_is_no_json_is_refused() {
        let deep = "[".repeat(100_000);
        for text in [
            "",
            "{",
            "{} {}",
            "NaN",
            "[1e999]",
            "{\"a\": Infinity}",
            &deep,
        ] {
            assert!(parse(text.as_bytes()).is_err(), "{text:.20}");
        }
        assert!(parse(b"{\"a\": \"\xff\"}").is_err());
    }

    #[test]
    fn count_is_exact_and_refuses_fractions_and_negatives() {
        let value = parse(b"{\"a\": 18014398509481985, \"b\": 8192.0, \"c\": 1.5, \"d\": -1, \"e\": \"1\", \"f\": 1e300}").unwrap();
        let fields = Fields::of("config", &value, "config").unwrap();
        assert_eq!(fields.count("a").unwrap(), Some(18014398509481985));
        assert_eq!(fields.count("b").unwrap(), Some(8192));
        for name in ["c", "d", "e", "f"] {
            assert!(fields.count(name).is_err(), "{name}");
        }
        assert_eq!(fields.count("g").unwrap(), None);
    }
}

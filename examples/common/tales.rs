//! A text in which context matters, made from a seed: what a byte is likely to be depends on bytes a line, a
//! document's middle, or a document's beginning away.
//!
//! # Grammar
//! ```text
//! text       = document*
//! document   = { introduction } password { numbered line } "\n"     4 to 6 introductions, 12 to 48 lines
//! introduction = NAME " of " TOWN " keeps the " THING ".\n"          all different within a document
//! password   = "The password is " WORD ".\n"
//! line       = NUMBER ". " ( visit | question | home | reminder | count | boxes ) "\n"
//! visit      = NAME " visits " NAME " in " TOWN "."                  the town where the second one lives
//! question   = "Who keeps the " THING "? " NAME "."                  as it was introduced
//! home       = "Where does " NAME " live? In " TOWN "."              as it was introduced
//! reminder   = "Say the password: " WORD "."                         as it was given
//! count      = "Count from " N ": " N " " N+1 " " N+2 … "."          3 to 8 numbers
//! boxes      = "Pack " BRACKETS "."                                  nested, each closed by its own kind
//! ```
//! Lines are numbered from 1 within a document. Names and passwords are made from letters afresh for every
//! document, so a model cannot know them by heart: it has to look them up, up to the document's length (500 to
//! 2,000 bytes) away.

use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};

const THINGS: [&str; 12] = [
    "lamp", "rope", "bell", "map", "kettle", "ladder", "drum", "key", "mirror", "anchor", "needle",
    "clock",
];
const BRACKETS: [(char, char); 3] = [('(', ')'), ('[', ']'), ('{', '}')];

/// At least `bytes` bytes of text, in whole documents.
pub fn tales(bytes: usize, seed: u64) -> Vec<u8> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut text = String::with_capacity(bytes + 4096);
    while text.len() < bytes {
        text.push_str(&document(&mut rng));
    }
    text.into_bytes()
}

struct Person {
    name: String,
    town: String,
    thing: &'static str,
}

fn document(rng: &mut StdRng) -> String {
    let mut things = THINGS;
    things.shuffle(rng);
    let count = rng.random_range(4..=6);
    let mut names: Vec<String> = Vec::new();
    while names.len() < 2 * count {
        let name = proper_name(rng);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let people: Vec<Person> = names
        .chunks_exact(2)
        .zip(things)
        .map(|(pair, thing)| Person {
            name: pair[0].clone(),
            town: pair[1].clone(),
            thing,
        })
        .collect();
    let password: String = (0..6).map(|_| rng.random_range('a'..='z')).collect();

    let mut text: String = people
        .iter()
        .map(|p| format!("{} of {} keeps the {}.\n", p.name, p.town, p.thing))
        .collect();
    text += &format!("The password is {password}.\n");
    for number in 1..=rng.random_range(12..=48) {
        text += &format!("{number}. {}\n", line(&people, &password, rng));
    }
    text + "\n"
}

fn line(people: &[Person], password: &str, rng: &mut StdRng) -> String {
    let (Some(one), Some(other)) = (people.choose(rng), people.choose(rng)) else {
        return String::new();
    };
    match rng.random_range(0..6) {
        0 => format!("{} visits {} in {}.", one.name, other.name, other.town),
        1 => format!("Who keeps the {}? {}.", one.thing, one.name),
        2 => format!("Where does {} live? In {}.", one.name, one.town),
        3 => format!("Say the password: {password}."),
        4 => {
            let start = rng.random_range(1..=999);
            let numbers: Vec<String> = (start..start + rng.random_range(3..=8))
                .map(|n: i32| n.to_string())
                .collect();
            format!("Count from {start}: {}.", numbers.join(" "))
        }
        _ => format!("Pack {}.", brackets(rng.random_range(3..=16), rng)),
    }
}

/// So many pairs of brackets, properly nested.
fn brackets(pairs: usize, rng: &mut StdRng) -> String {
    let (mut text, mut open, mut left) = (String::new(), Vec::new(), pairs);
    while left > 0 || !open.is_empty() {
        let opens = left > 0 && (open.is_empty() || rng.random_bool(0.55));
        let kind = if opens { BRACKETS.choose(rng) } else { None };
        if let Some(&(opening, closing)) = kind {
            text.push(opening);
            open.push(closing);
            left -= 1;
        } else if let Some(closing) = open.pop() {
            text.push(closing);
        }
    }
    text
}

/// Two or three syllables, with a capital.
fn proper_name(rng: &mut StdRng) -> String {
    let mut name = String::new();
    for _ in 0..rng.random_range(2..=3) {
        for letters in ["bdfgklmnprstvz", "aeiou"] {
            let n = rng.random_range(0..letters.len());
            name.push_str(&letters[n..=n]);
        }
    }
    name[..1].to_uppercase() + &name[1..]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> String {
        String::from_utf8(tales(50_000, 1)).unwrap()
    }

    #[test]
    fn tales_same_seed_same_text() {
        assert_eq!(tales(10_000, 7), tales(10_000, 7));
        assert_ne!(tales(10_000, 7), tales(10_000, 8));
    }

    #[test]
    fn tales_brackets_close_in_order_by_their_own_kind() {
        let text = sample();
        let (mut seen, mut deepest) = (0, 0);
        for line in text.lines().filter(|l| l.contains("Pack ")) {
            let mut open = Vec::new();
            for c in line.chars() {
                if let Some((_, closing)) = BRACKETS.iter().find(|(opening, _)| *opening == c) {
                    open.push(*closing);
                } else if BRACKETS.iter().any(|(_, closing)| *closing == c) {
                    assert_eq!(open.pop(), Some(c), "{line}");
                }
                deepest = deepest.max(open.len());
            }
            assert!(open.is_empty(), "{line}");
            seen += 1;
        }
        assert!(seen > 50 && deepest > 3, "{seen} lines, depth {deepest}");
    }

    #[test]
    fn tales_questions_answered_as_introduced() {
        let text = sample();
        let mut asked = 0;
        for document in text.trim_end().split("\n\n") {
            for line in document.lines() {
                if let Some((_, question)) = line.split_once("Who keeps the ") {
                    let (thing, name) = question.trim_end_matches('.').split_once("? ").unwrap();
                    let introduction = document
                        .lines()
                        .find(|l| l.ends_with(&format!(" keeps the {thing}.")))
                        .unwrap();
                    assert!(introduction.starts_with(&format!("{name} of ")), "{line}");
                    asked += 1;
                }
            }
        }
        assert!(asked > 50);
    }

    #[test]
    fn tales_counts_rise_by_one() {
        let text = sample();
        let mut counted = 0;
        for (_, numbers) in text.lines().filter_map(|l| l.split_once("Count from ")) {
            let (start, rest) = numbers.trim_end_matches('.').split_once(": ").unwrap();
            let start: i32 = start.parse().unwrap();
            for (n, word) in rest.split(' ').enumerate() {
                assert_eq!(word.parse::<i32>().unwrap(), start + n as i32, "{numbers}");
            }
            counted += 1;
        }
        assert!(counted > 50);
    }
}

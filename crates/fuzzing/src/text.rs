//! Changes of keys and values in text.

use proptest::prelude::*;
use proptest::sample::Index;

use super::mutate;

/// A text format, and values at which its readers fail more often.
#[derive(Clone, Copy, Debug)]
pub struct TextFormat {
    /// What stands between a key and its value.
    separator: u8,
    values: &'static [&'static str],
    /// Opens a value that can be nested, and closes it.
    nesting: (&'static str, &'static str),
}

/// TOML.
pub const TOML: TextFormat = TextFormat {
    separator: b'=',
    values: &[
        "0",
        "-0.0",
        "-1",
        "1",
        "2",
        "3",
        "7",
        "64",
        "256",
        "1024",
        "4096",
        "65536",
        "262144",
        "1048576",
        "16777216",
        "4294967296",
        "1099511627776",
        "9e15",
        "9000000000000000",
        "9223372036854775807",
        "-9223372036854775808",
        "18446744073709551615",
        "0.5",
        "0.999999",
        "1.0",
        "1e-320",
        "1e308",
        "-1e308",
        "1e400",
        "nan",
        "inf",
        "-inf",
        "true",
        "false",
        "\"\"",
        "\"never\"",
        "\"off\"",
        "\"none\"",
        "\"9e15\"",
        "\"9000000B\"",
        "\"9000000B tokens\"",
        "\"1 tokens\"",
        "\"nan\"",
        "\"0 %\"",
        "\"100 %\"",
        "\"-1\"",
        "\"/\"",
        "\"\\u0000\"",
        "[]",
        "[0]",
        "[1, 2]",
        "[\"rope\"]",
        "[{}]",
        "{}",
        "{ kind = \"rope\" }",
        "{ kind = \"\" }",
        "1979-05-27T07:32:00Z",
    ],
    nesting: ("[", "]"),
};

/// JSON.
pub const JSON: TextFormat = TextFormat {
    separator: b':',
    values: &[
        "0",
        "-0.0",
        "-1",
        "1",
        "2",
        "3",
        "64",
        "4294967296",
        "9223372036854775807",
        "-9223372036854775808",
        "18446744073709551615",
        "18446744073709551616",
        "0.5",
        "1e-320",
        "1e308",
        "-1e308",
        "1e400",
        "null",
        "true",
        "\"\"",
        "\"\\u0000\"",
        "[]",
        "[0]",
        "[1, 2]",
        "[4294967296, 4294967296]",
        "[0, 18446744073709551615]",
        "{}",
        "{\"kind\": \"rope\"}",
        "\"F64\"",
        "\"BF16\"",
        "\"U8\"",
        "\"F4\"",
    ],
    nesting: ("[", "]"),
};

#[derive(Clone, Debug)]
pub(crate) enum Change {
    /// Replaces the value of a key.
    Value(Index, Vec<u8>),
    /// Replaces a number anywhere, as in an array.
    Number(Index, Vec<u8>),
    InsertLine(Index, Vec<u8>),
    RemoveLine(Index),
    /// Copies a line to another place.
    RepeatLine(Index, Index),
    /// Copies the value of a key to another key.
    SameValue(Index, Index),
}

/// A change; `lines` are lines to insert.
pub(crate) fn change(
    format: TextFormat,
    lines: &[String],
) -> impl Strategy<Value = Change> + use<> {
    let index = any::<Index>;
    let (open, close) = format.nesting;
    let nested = prop::sample::select(vec![3, 100, 20_000])
        .prop_map(move |depth| [open.repeat(depth), close.repeat(depth)].concat());
    let long = prop::sample::select(vec![300, 50_000])
        .prop_map(|length| format!("\"{}\"", "long ".repeat(length / 5)));
    let value = prop_oneof![
        40 => prop::sample::select(format.values).prop_map(str::to_owned),
        1 => nested,
        1 => long,
    ];
    let value = value.prop_map(String::into_bytes);
    let lines: Vec<Vec<u8>> = match lines {
        [] => vec![b"key = 1".to_vec()],
        lines => lines.iter().map(|line| line.clone().into_bytes()).collect(),
    };
    prop_oneof![
        8 => (index(), value.clone()).prop_map(|(at, value)| Change::Value(at, value)),
        3 => (index(), value).prop_map(|(at, value)| Change::Number(at, value)),
        4 => (index(), prop::sample::select(lines))
            .prop_map(|(at, line)| Change::InsertLine(at, line)),
        1 => index().prop_map(Change::RemoveLine),
        1 => (index(), index()).prop_map(|(from, to)| Change::RepeatLine(from, to)),
        1 => (index(), index()).prop_map(|(from, to)| Change::SameValue(from, to)),
    ]
}

/// Where the value of the `separator` at `at` stands.
fn value_after(content: &[u8], at: usize) -> std::ops::Range<usize> {
    let spaces = content[at + 1..].iter().take_while(|byte| **byte == b' ').count();
    let start = at + 1 + spaces;
    let (mut depth, mut quoted) = (0usize, false);
    for (place, byte) in content.iter().enumerate().skip(start) {
        match byte {
            b'"' => quoted = !quoted,
            _ if quoted => {}
            b'[' | b'{' => depth += 1,
            b',' | b'}' | b']' | b'\n' if depth == 0 => return start..place,
            b']' | b'}' => depth -= 1,
            _ => {}
        }
    }
    start..content.len()
}

/// The numbers of a text.
fn numbers(content: &[u8]) -> Vec<std::ops::Range<usize>> {
    let is_part = |byte: &u8| byte.is_ascii_digit() || *byte == b'.';
    let mut found = vec![];
    let mut at = 0;
    while at < content.len() {
        let length = content[at..].iter().take_while(|byte| is_part(byte)).count();
        if length > 0 {
            found.push(at..at + length);
        }
        at += length + 1;
    }
    found
}

/// The start of each line, and the end of the text.
fn line_starts(content: &[u8]) -> Vec<usize> {
    let after = content.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
    let mut starts: Vec<usize> = [0].into_iter().chain(after.map(|(at, _)| at + 1)).collect();
    starts.push(content.len());
    starts
}

/// Applies a change to `content`.
pub(crate) fn apply(change: &Change, format: TextFormat, content: &mut Vec<u8>) {
    let value = |index: &Index, content: &[u8]| {
        let places: Vec<usize> =
            (0..content.len()).filter(|&at| content[at] == format.separator).collect();
        (!places.is_empty()).then(|| value_after(content, places[index.index(places.len())]))
    };
    let line = |index: &Index, content: &[u8]| {
        let starts = line_starts(content);
        let at = index.index(starts.len() - 1);
        starts[at]..starts[at + 1]
    };
    match change {
        Change::Value(at, new) => {
            if let Some(place) = value(at, content) {
                content.splice(place, new.iter().copied());
            }
        }
        Change::Number(at, new) => {
            let places = numbers(content);
            if !places.is_empty() {
                let place = places[at.index(places.len())].clone();
                content.splice(place, new.iter().copied());
            }
        }
        Change::InsertLine(at, new) => {
            let at = line(at, content).start;
            content.splice(at..at, new.iter().copied().chain([b'\n']));
        }
        Change::RemoveLine(at) => drop(content.drain(line(at, content))),
        Change::RepeatLine(from, to) => {
            let copy = content[line(from, content)].to_vec();
            let at = line(to, content).start;
            content.splice(at..at, copy);
        }
        Change::SameValue(from, to) => {
            if let (Some(from), Some(to)) = (value(from, content), value(to, content)) {
                let copy = content[from].to_vec();
                content.splice(to, copy);
            }
        }
    }
}

/// One of the seeds with up to five changes of its keys and values; in one of four cases also of its bytes.
/// Keys that the seeds lack come from `lines`.
pub fn mutated_text(
    seeds: Vec<Vec<u8>>,
    format: TextFormat,
    lines: &[String],
) -> impl Strategy<Value = Vec<u8>> + use<> {
    let changes = prop::collection::vec(change(format, lines), 0..6);
    let edits = prop_oneof![
        3 => Just(vec![]),
        1 => prop::collection::vec(mutate::edit(format.values), 0..4),
    ];
    (any::<Index>(), changes, edits).prop_map(move |(seed, changes, edits)| {
        let mut content = seeds[seed.index(seeds.len())].clone();
        changes.iter().for_each(|change| apply(change, format, &mut content));
        edits.iter().for_each(|edit| mutate::apply(edit, &seeds, &mut content));
        content
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_ends_where_its_table_or_line_does() {
        let value = |text: &str, at: usize| {
            let place = value_after(text.as_bytes(), at);
            text[place].to_owned()
        };
        assert_eq!(value("a = 1\nb = 2", 2), "1");
        assert_eq!(value("a = { b = [1, 2], c = 3 }\n", 2), "{ b = [1, 2], c = 3 }");
        assert_eq!(value("a = { b = [1, 2], c = 3 }\n", 8), "[1, 2]");
        assert_eq!(value("a = { b = [1, 2], c = 3 }\n", 20), "3 ");
        assert_eq!(value("{\"a\":\"x, }\",\"b\":2}", 4), "\"x, }\"");
        assert_eq!(value("a =", 2), "");
    }

    proptest! {
        /// A text with one line, one value and one number: every index means it.
        #[test]
        fn changes_replace_values_numbers_and_lines(at in any::<Index>()) {
            let changed = |change: Change| {
                let mut text = b"a = 1".to_vec();
                apply(&change, TOML, &mut text);
                String::from_utf8(text).unwrap()
            };
            prop_assert_eq!(changed(Change::Value(at, b"nan".into())), "a = nan");
            prop_assert_eq!(changed(Change::Number(at, b"-7".into())), "a = -7");
            prop_assert_eq!(changed(Change::InsertLine(at, b"b = 2".into())), "b = 2\na = 1");
            prop_assert_eq!(changed(Change::RepeatLine(at, at)), "a = 1a = 1");
            prop_assert_eq!(changed(Change::RemoveLine(at)), "");
        }
    }
}

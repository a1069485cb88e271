//! Problems with an attention kind's settings, told in the options of a command.

use longwall_config::{Problem, Problems};

/// What a command calls the sizes of a layer.
#[derive(Clone, Copy)]
pub struct SizeNames {
    /// Channels of a head.
    pub head_dim: &'static str,
    /// Width of the layer's input.
    pub width: &'static str,
}

/// The problems below each other, with options in place of a configuration's keys.
pub fn in_options(problems: &Problems, sizes: SizeNames) -> String {
    let plain = |text: &str| {
        text.replace("model.window", "--window")
            .replace("model.head_dim", sizes.head_dim)
            .replace("model.width", sizes.width)
            .replace("width / heads", sizes.head_dim)
    };
    let one = |Problem { key, value, allowed, remedy }: &Problem| {
        let problem = Problem {
            key: plain(&key.replace("model.attention.", "--set ")),
            value: value.clone(),
            allowed: plain(&allowed.replace("model.attention.", "")),
            remedy: plain(&settings(&remedy.replace("model.attention.", ""))),
        };
        format!("\n{problem}")
    };
    problems.as_slice().iter().map(one).collect()
}

/// `text` with each `key = value` (or `set key = value`) as an option that a shell understands.
fn settings(text: &str) -> String {
    let (mut done, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once(" = ") {
        let (words, key) = before.rsplit_once(' ').map_or(("", before), |(w, key)| (w, key));
        let words = words.strip_suffix("set").unwrap_or(words).trim_end();
        let string = after.strip_prefix('"').and_then(|text| text.find('"'));
        let length = match string {
            Some(quote) => quote + 2,
            None => after.find([' ', ',', ';']).unwrap_or(after.len()),
        };
        let (value, next) = after.split_at(length);
        done += words;
        done += if words.is_empty() && done.is_empty() { "" } else { " " };
        done += &match (key, string) {
            ("kind", _) => format!("--kind {}", value.trim_matches('"')),
            (_, Some(_)) => format!("--set '{key}={value}'"),
            (_, None) => format!("--set {key}={value}"),
        };
        rest = next;
    }
    done + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_become_options() {
        for (text, options) in [
            ("set theta = 10000", "--set theta=10000"),
            ("leave it out", "leave it out"),
            ("set a = 7.0; 6 to 8 are open", "--set a=7.0; 6 to 8 are open"),
            (
                "leave it out, or set form = \"x y\" to rest",
                "leave it out, or --set 'form=\"x y\"' to rest",
            ),
            (
                "set p = 2, form = \"attention\", or more heads",
                "--set p=2, --set 'form=\"attention\"', or more heads",
            ),
            (
                "set rotary_fraction = 1.0, or rope = false",
                "--set rotary_fraction=1.0, or --set rope=false",
            ),
            ("at least 2 with kind = \"fox\"", "at least 2 with --kind fox"),
        ] {
            assert_eq!(settings(text), options);
        }
    }
}

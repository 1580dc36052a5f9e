//! Checks texts for broken links, paths of a developer's machine, and files that are too long.

use crate::policy;
use std::path::{Component, Path, PathBuf};

/// A link inside the repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// The file, relative to the folder of the text; empty for the text itself.
    pub path: String,
    /// The heading in the file.
    pub heading: Option<String>,
}

/// Returns the lines of a Markdown text that are not code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut in_code = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        in_code ^= fence;
        !in_code && !fence
    })
}

/// Returns the links of a Markdown text to files of the repository.
pub fn links(text: &str) -> Vec<Link> {
    let mut links = Vec::new();
    for line in prose(text) {
        // Text in backquotes is code.
        let plain: String = line.split('`').step_by(2).collect::<Vec<_>>().join("code");
        for (start, _) in plain.match_indices("](") {
            let rest = &plain[start + 2..];
            let target = rest.split([')', ' ']).next().unwrap_or_default();
            let elsewhere = target.contains("://") || target.starts_with("mailto:");
            if elsewhere || target.is_empty() {
                continue;
            }
            let (path, heading) = match target.split_once('#') {
                Some((path, heading)) => (path, Some(heading.to_owned())),
                None => (target, None),
            };
            links.push(Link {
                path: path.to_owned(),
                heading,
            });
        }
    }
    links
}

/// Returns the anchors of the headings of a Markdown text.
pub fn headings(text: &str) -> Vec<String> {
    let titles = prose(text).filter(|line| line.starts_with('#'));
    let name = |title: &str| {
        let title = title.trim_start_matches('#').trim().to_lowercase();
        let kept = title
            .chars()
            .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    titles.map(name).collect()
}

/// Returns the target of a link, relative to the root; `None` when it is outside.
pub fn target(file: &Path, link: &Link) -> Option<PathBuf> {
    if link.path.is_empty() {
        return Some(file.to_owned());
    }
    let mut path = file.parent()?.to_owned();
    for component in Path::new(&link.path).components() {
        match component {
            Component::Normal(name) => path.push(name),
            Component::ParentDir if path.pop() => {}
            Component::CurDir => {}
            _ => return None,
        }
    }
    Some(path)
}

/// Returns the numbers of the lines that are too wide, in columns. In Markdown texts, tables, code
/// and single words cannot be wrapped, and may be wider.
pub fn wide_lines(path: &str, text: &str) -> Vec<usize> {
    let is_document = path.ends_with(".md");
    let mut in_code = false;
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let fence = is_document && line.trim_start().starts_with("```");
        in_code ^= fence;
        let is_table = line.trim_start().starts_with('|');
        let is_one_word = !line.trim().contains(' ');
        let may_be_wide = is_document && (in_code || is_table || is_one_word);
        if !may_be_wide && line.chars().count() > policy::COLUMNS_MAX {
            found.push(index + 1);
        }
    }
    found
}

/// Returns the phrases of a Markdown text that the glossary does not allow.
pub fn refused_phrases(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in prose(text) {
        // Text in backquotes is code, or a name.
        let plain: String = line.split('`').step_by(2).collect::<Vec<_>>().join(" ");
        let plain = plain.to_lowercase();
        let phrases = policy::PHRASES.iter().filter(|(phrase, _)| {
            let mut places = plain.match_indices(phrase);
            places.any(|(at, _)| {
                let letter = |c: Option<char>| c.is_some_and(char::is_alphabetic);
                let after = plain[at + phrase.len()..].chars().next();
                !letter(plain[..at].chars().next_back()) && !letter(after)
            })
        });
        let say = |(phrase, instead): &(&str, &str)| {
            format!("\"{phrase}\" (say {instead}): {}", line.trim())
        };
        found.extend(phrases.map(say));
    }
    found
}

/// Returns folders that exist only on the author's machine.
pub fn machine_paths(text: &str) -> Vec<String> {
    // Assembled here, so that the check does not report this file.
    let folders = [["/ho", "me/"], ["/Us", "ers/"], ["/wo", "rk/"]].map(|halves| halves.concat());
    let mut found = Vec::new();
    for line in text.lines() {
        for folder in &folders {
            for (start, _) in line.match_indices(folder.as_str()) {
                let before = line[..start].chars().next_back();
                if before.is_none_or(|c| !c.is_alphanumeric() && !"._-~}".contains(c)) {
                    found.push(line.trim().to_owned());
                }
            }
        }
    }
    found
}

/// Returns whether a source file is too long, by its path and text.
pub fn is_too_long(path: &str, text: &str) -> bool {
    let excused = policy::LONG_FILES.iter().any(|(file, _)| *file == path);
    text.lines().count() > policy::LINES_MAX && !excused
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_found() {
        let text = "[a](docs/a.md) ![b](b.png \"B\") [c](https://c.org/d) `[d](d.md)`\n\
            ```\n[e](e.md)\n```\n[f](../f.md#two-words) and [g](#here)";
        let link = |path: &str, heading: Option<&str>| Link {
            path: path.to_owned(),
            heading: heading.map(str::to_owned),
        };
        let expected = [
            link("docs/a.md", None),
            link("b.png", None),
            link("../f.md", Some("two-words")),
            link("", Some("here")),
        ];
        assert_eq!(links(text), expected);
        let from = |file: &str, link: &Link| target(Path::new(file), link);
        assert_eq!(from("docs/x.md", &expected[2]), Some("f.md".into()));
        assert_eq!(from("x.md", &expected[2]), None, "outside");
        assert_eq!(from("docs/x.md", &expected[3]), Some("docs/x.md".into()));
        assert_eq!(from("docs/x.md", &link("/etc/passwd", None)), None);
    }

    #[test]
    fn headings_are_named() {
        let text = "# One `two`\n```\n# not this\n```\n## 4.1 Layout, again";
        assert_eq!(headings(text), ["one-two", "41-layout-again"]);
    }

    #[test]
    fn paths_of_a_machine_are_found() {
        let path = |halves: [&str; 2]| format!("see {}", halves.concat());
        assert_eq!(machine_paths(&path(["/ho", "me/jo/x"])).len(), 1);
        assert_eq!(machine_paths(&path(["/Us", "ers/jo/x"])).len(), 1);
        assert_eq!(machine_paths(&path(["`/wo", "rk/main`"])).len(), 1);
        assert_eq!(
            machine_paths("https://example.org/work/x and docs/home/x"),
            [""; 0]
        );
    }

    #[test]
    fn wide_lines_are_found() {
        let wide = "x ".repeat(policy::COLUMNS_MAX / 2 + 1);
        let text = format!("a\n{wide}\n| {wide} |\n```\n{wide}\n```\n{wide}\n");
        assert_eq!(wide_lines("a.md", &text), [2, 7]);
        assert_eq!(wide_lines("a.rs", &text), [2, 3, 5, 7]);
        assert_eq!(wide_lines("a.rs", &"é".repeat(policy::COLUMNS_MAX)), [0; 0]);
    }

    #[test]
    fn phrases_are_found() {
        let text = "Whoever sends, and what is left.\n`whoever` and anewly\n```\nwhoever\n```\n";
        let found = refused_phrases(text);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("\"whoever\""));
    }

    #[test]
    fn long_files_are_found() {
        assert!(is_too_long("x.rs", &"\n".repeat(policy::LINES_MAX + 1)));
        assert!(!is_too_long("x.rs", &"\n".repeat(policy::LINES_MAX)));
    }
}

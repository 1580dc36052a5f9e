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
    fn long_files_are_found() {
        assert!(is_too_long("x.rs", &"\n".repeat(policy::LINES_MAX + 1)));
        assert!(!is_too_long("x.rs", &"\n".repeat(policy::LINES_MAX)));
    }
}

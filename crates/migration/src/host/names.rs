//! The rules for names of hosts.

/// Returns whether a name is valid for a host. It must fit a path of the API, a file name and a
/// line.
pub fn is_name(name: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    (1..=63).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(fits)
}

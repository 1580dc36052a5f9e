//! Finds every place where the code of migrations refuses a move, and holds what shows each of them
//! before a move begins: nothing that a plan could say may be found out later.

use std::collections::BTreeMap;

/// How a refusal is seen before a move begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// A test shows it in a plan: `FILE::TEST`, below `crates`.
    InPlan(&'static str),
    /// The plan calls this function too, through the named one. A test of the function itself, or
    /// of another of its refusals in a plan: `FILE::TEST`, below `crates`.
    Shared(&'static str, &'static str),
    /// It is known only at that moment: why.
    Later(&'static str),
    /// It is no refusal of its own: it makes or passes on one of another function.
    Passes(&'static str),
}

use Shown::{InPlan, Later, Passes, Shared};

// The tests, by file and name.
const ABSURD: &str = "longhaul/tests/hostile.rs::\
    absurd_offers_are_refused_before_anything_is_made";
const ATTACHED: &str = "lab/tests/attach.rs::\
    a_script_s_guest_is_moved_and_verified";
const BASES: &str = "lab/tests/disks/base.rs::\
    a_disk_on_a_base_image_moves_without_it";
const BRIDGES: &str = "migration/src/companions/bridge_ports.rs::\
    a_bridge_must_be_able_to_do_what_the_port_needs";
const DOMAINS: &str = "lab/tests/libvirt/agents.rs::\
    what_keeps_a_domain_from_moving_is_said_before";
const IMAGES: &str = "longhaul/tests/refusals.rs::\
    a_plan_shows_what_the_images_of_the_destination_refuse";
const KNOWN: &str = "longhaul/tests/refusals.rs::\
    a_plan_shows_what_the_destination_knows_of_the_guest";
const LACKING: &str = "longhaul/tests/refusals.rs::\
    a_plan_shows_what_the_hosts_themselves_lack";
const LEASES: &str = "lab/tests/leases.rs::\
    a_source_takes_its_guest_back_through_the_arbiter_when_the_destination_is_lost";
const LIMITS: &str = "longhaul/tests/refusals.rs::\
    a_plan_shows_the_limits_of_the_source_at_the_destination";
const LINES: &str = "lab-guests/tests/guests.rs::\
    every_line_has_the_expected_result";
const LISTED: &str = "migration/src/limits/peer_quota.rs::\
    everything_that_a_guest_uses_has_to_be_listed";
const NO_ROOM: &str = "lab/tests/disks/main.rs::\
    a_destination_without_room_is_refused_or_gives_the_move_up";
const OLD_HOST: &str = "longhaul/tests/files.rs::\
    a_host_that_cannot_prove_anything_is_offered_no_guest_with_files";
const ON_ONE_HOST: &str = "longhaul/tests/files.rs::\
    variables_and_initrds_are_of_both_hosts_or_of_none";
const READ_ONLY: &str = "lab/tests/one_file.rs::\
    a_read_only_image_moves_along_if_the_destination_has_none";
const SHARED_FILES: &str = "lab/tests/one_file.rs::\
    a_guest_with_a_disk_of_its_own_moves_only_to_its_shared_files";
const SOURCE: &str = "longhaul/tests/refusals.rs::\
    a_plan_shows_what_changed_on_the_source";
const UNDER_WAY: &str = "lab/tests/disks/changed.rs::\
    what_is_under_way_on_a_guests_disks_is_in_its_plan";
const UNTOLD: &str = "longhaul/tests/files.rs::\
    who_says_nothing_of_a_file_is_not_believed";
const VOLUMES: &str = "lab/tests/disks/volumes.rs::\
    a_volume_with_something_on_it_or_in_use_is_not_written_to";

/// Texts that refuse something.
const MARKS: [&str; 8] = [
    "RefusalCode::",
    "ErrorCode::Refused",
    "refusal(",
    "refuse(",
    "refused(",
    "invalid(",
    "unsuitable(",
    "cannot(",
];

/// Returns the functions of a source that refuse something, each with the number of lines that do.
/// Test code does not count.
pub fn sites(text: &str) -> BTreeMap<String, usize> {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let (mut sites, mut function) = (BTreeMap::new(), String::new());
    for line in code.lines() {
        let line = line.trim_start();
        if line.starts_with("//") {
            continue;
        }
        if let Some((before, after)) = line.split_once("fn ") {
            let is_name = |letter: char| letter.is_alphanumeric() || letter == '_';
            let end = after.find(|letter| !is_name(letter));
            let name = &after[..end.unwrap_or(after.len())];
            if !name.is_empty()
                && before
                    .chars()
                    .all(|c| c.is_alphanumeric() || " _()".contains(c))
            {
                name.clone_into(&mut function);
                continue;
            }
        }
        let marked = |mark: &&str| {
            line.match_indices(*mark).any(|(at, _)| {
                let before = line[..at].chars().next_back();
                !before.is_some_and(|letter| letter.is_alphanumeric() || letter == '_')
            })
        };
        if MARKS.iter().any(marked) {
            *sites.entry(function.clone()).or_default() += 1;
        }
    }
    sites
}

/// Returns what of a source differs from the list.
pub fn findings(path: &str, text: &str) -> Vec<String> {
    let found = sites(text);
    let listed: BTreeMap<&str, usize> = LIST
        .iter()
        .filter(|(file, ..)| *file == path)
        .map(|(_, function, count, _)| (*function, *count))
        .collect();
    let mut findings = Vec::new();
    for (function, count) in &found {
        match listed.get(function.as_str()) {
            None => findings.push(format!("{path}: `{function}` refuses and is not listed")),
            Some(known) if known != count => findings.push(format!(
                "{path}: `{function}` has {count} lines that refuse, and {known} are listed"
            )),
            Some(_) => {}
        }
    }
    let gone = listed.keys().filter(|name| !found.contains_key(**name));
    findings.extend(gone.map(|name| format!("{path}: `{name}` is listed and refuses nothing")));
    findings
}

/// Returns the tests of the list, as file and name.
pub fn tests() -> impl Iterator<Item = (&'static str, &'static str)> {
    LIST.iter().filter_map(|(.., shown)| match shown {
        InPlan(test) | Shared(_, test) => test.split_once("::"),
        Later(_) | Passes(_) => None,
    })
}

/// Returns whether a file of the list exists.
pub fn files() -> impl Iterator<Item = &'static str> {
    LIST.iter().map(|(file, ..)| *file)
}

/// Every function of `crates/migration/src` that refuses something, with the number of its lines
/// that do. What operators decide about a guest in doubt is not a part of a move.
const LIST: &[(&str, &str, usize, Shown)] = &[
    (
        "companions/base_images.rs",
        "prepare",
        1,
        Later("a disk export is started for QEMU"),
    ),
    (
        "companions/bridge_ports.rs",
        "check",
        1,
        Shared("look", BRIDGES),
    ),
    (
        "companions/disk_images.rs",
        "prepare",
        1,
        Later("the images are made"),
    ),
    (
        "companions/flash_variables.rs",
        "check",
        1,
        InPlan(ATTACHED),
    ),
    ("companions/flash_variables.rs", "look", 1, InPlan(ATTACHED)),
    (
        "companions/flash_variables.rs",
        "prepare",
        2,
        Later("the image is made; a source of Longhaul offers no machine without flash for it"),
    ),
    ("companions/hooks.rs", "check", 1, InPlan(LACKING)),
    (
        "companions/hooks.rs",
        "prepare",
        1,
        Later("the hook itself refuses"),
    ),
    (
        "companions/shared_files.rs",
        "check",
        2,
        InPlan(SHARED_FILES),
    ),
    (
        "companions/shared_files.rs",
        "started",
        1,
        Later("a file was exchanged since the question"),
    ),
    (
        "companions/shared_files.rs",
        "unsuitable",
        1,
        Passes("makes the refusals of `check`"),
    ),
    (
        "destination/admission.rs",
        "inquiry",
        4,
        Passes("of a connection that returns to an attempt, not of an offer"),
    ),
    (
        "destination/attempt/prepare.rs",
        "admit",
        1,
        Later("something else holds the guest's name at that moment"),
    ),
    (
        "destination/attempt/prepare.rs",
        "begin",
        4,
        Later("the journal of the attempt cannot be written"),
    ),
    (
        "destination/attempt/prepare.rs",
        "cannot",
        2,
        Passes("makes the refusals of `begin`"),
    ),
    (
        "destination/attempt/prepare.rs",
        "check",
        1,
        Passes("of `checks_now`"),
    ),
    (
        "destination/attempt/prepare.rs",
        "launch",
        2,
        Later("only the QEMU that was launched says it"),
    ),
    (
        "destination/attempt/prepare.rs",
        "note_incomplete",
        2,
        Later("the journal of the attempt cannot be written"),
    ),
    ("destination/call.rs", "may_send", 1, InPlan(LIMITS)),
    ("destination/checks.rs", "checks_now", 6, InPlan(LACKING)),
    ("destination/files.rs", "add", 1, InPlan(SHARED_FILES)),
    (
        "destination/files.rs",
        "comes_or_arrives",
        3,
        InPlan(UNTOLD),
    ),
    (
        "destination/files.rs",
        "one_is_local",
        1,
        InPlan(ON_ONE_HOST),
    ),
    ("destination/files.rs", "only_one", 1, InPlan(ON_ONE_HOST)),
    ("destination/files.rs", "prove", 1, InPlan(UNTOLD)),
    ("destination/files.rs", "untold", 1, InPlan(UNTOLD)),
    (
        "destination/qemu.rs",
        "into_refusal",
        3,
        Later("only the QEMU that was launched says it"),
    ),
    ("disks/backing_files.rs", "check", 4, InPlan(UNDER_WAY)),
    (
        "disks/backing_files.rs",
        "is_overlay",
        1,
        Shared("check", UNDER_WAY),
    ),
    (
        "disks/backing_files.rs",
        "refused",
        1,
        Passes("makes the refusals of this file"),
    ),
    ("disks/base_images.rs", "enough_room", 1, InPlan(BASES)),
    ("disks/base_images.rs", "look", 5, InPlan(BASES)),
    ("disks/base_images.rs", "no_base", 1, InPlan(BASES)),
    (
        "disks/base_images.rs",
        "other_size",
        1,
        Shared("lacking", BASES),
    ),
    (
        "disks/fate.rs",
        "invalid",
        1,
        Passes("makes the refusals of others"),
    ),
    (
        "disks/fate.rs",
        "refused",
        1,
        Passes("makes the refusals of others"),
    ),
    (
        "disks/images.rs",
        "allocate",
        1,
        Later("a volume is allocated when its guest comes: a plan changes nothing"),
    ),
    ("disks/images.rs", "enough_room", 1, InPlan(NO_ROOM)),
    ("disks/images.rs", "free_path", 8, InPlan(IMAGES)),
    ("disks/images.rs", "look_for_room", 4, InPlan(IMAGES)),
    ("disks/images.rs", "place", 4, InPlan(IMAGES)),
    (
        "disks/images.rs",
        "places",
        1,
        Later("the source breaks the protocol"),
    ),
    ("disks/qcow2.rs", "look", 2, InPlan(SOURCE)),
    ("disks/volumes.rs", "belongs_to", 1, InPlan(VOLUMES)),
    ("disks/volumes.rs", "check_size", 1, InPlan(VOLUMES)),
    ("disks/volumes.rs", "permission", 2, InPlan(VOLUMES)),
    (
        "disks/volumes.rs",
        "refusal",
        1,
        Passes("makes the refusals of this file"),
    ),
    ("disks/volumes.rs", "take", 2, InPlan(VOLUMES)),
    (
        "disks/volumes.rs",
        "unknown",
        1,
        Passes("of a volume that cannot be read"),
    ),
    ("host/base_images.rs", "not_here", 1, InPlan(BASES)),
    ("limits/peer_quota.rs", "is_elsewhere", 6, InPlan(KNOWN)),
    ("limits/peer_quota.rs", "listed", 5, InPlan(LIMITS)),
    (
        "limits/peer_quota.rs",
        "look_at",
        3,
        Later("an attempt of the same number goes on, or its journal is another's"),
    ),
    ("limits/peer_quota.rs", "of", 1, InPlan(LIMITS)),
    (
        "limits/peer_quota.rs",
        "own_vlans",
        1,
        Shared("may_name", LISTED),
    ),
    ("limits/peer_quota.rs", "refuse_older", 2, InPlan(KNOWN)),
    (
        "limits/peer_quota.rs",
        "right_of",
        1,
        Later("the right cannot be read"),
    ),
    (
        "limits/peer_quota.rs",
        "sound",
        2,
        Shared("checks_now", ABSURD),
    ),
    ("source/arbiter.rs", "check", 2, InPlan(LEASES)),
    (
        "source/attempt.rs",
        "decided",
        1,
        Passes("of the destination, in the middle of its preparations"),
    ),
    (
        "source/attempt/launch_wait.rs",
        "accepted",
        1,
        Later("only the QEMU that was launched says it"),
    ),
    (
        "source/checks.rs",
        "into_check",
        1,
        Passes("shows a reason in a plan"),
    ),
    ("source/checks.rs", "of", 1, InPlan(LINES)),
    (
        "source/connect.rs",
        "failure",
        1,
        Passes("of the destination"),
    ),
    (
        "source/described.rs",
        "described",
        1,
        Later("the kernel does not show the ports of a TAP device"),
    ),
    ("source/files.rs", "hold", 2, InPlan(SOURCE)),
    ("source/files.rs", "is_used", 2, InPlan(SOURCE)),
    (
        "source/files.rs",
        "refused",
        1,
        Passes("makes the refusals of this file"),
    ),
    (
        "source/files.rs",
        "say_content",
        1,
        Later("a file that was locked a moment ago cannot be read"),
    ),
    ("source/files.rs", "take", 2, InPlan(SOURCE)),
    ("source/local_disks.rs", "check", 2, InPlan(UNDER_WAY)),
    ("source/local_disks.rs", "image_of", 1, InPlan(SOURCE)),
    ("source/local_disks.rs", "local_disk", 4, InPlan(SOURCE)),
    ("source/local_disks.rs", "open", 2, InPlan(SOURCE)),
    (
        "source/local_disks.rs",
        "open_read_only",
        1,
        Later("the image was locked a moment ago and cannot be read any more"),
    ),
    (
        "source/local_disks.rs",
        "refused",
        1,
        Passes("makes the refusals of this file"),
    ),
    (
        "source/memory_strategy.rs",
        "too_old_to_follow",
        1,
        InPlan(OLD_HOST),
    ),
    (
        "source/plan.rs",
        "ask_there",
        3,
        Passes("shows a refusal in a plan"),
    ),
    (
        "source/plan.rs",
        "look_here",
        2,
        Passes("shows a refusal in a plan"),
    ),
    (
        "source/plan.rs",
        "plan",
        1,
        Passes("shows a refusal in a plan"),
    ),
    (
        "source/plan.rs",
        "refused",
        1,
        Passes("shows a refusal in a plan"),
    ),
    (
        "source/plan.rs",
        "refused_here",
        1,
        Passes("shows a refusal in a plan"),
    ),
    (
        "source/plan.rs",
        "shown",
        1,
        Passes("shows a refusal in a plan"),
    ),
    ("source/candidate.rs", "candidate", 1, InPlan(DOMAINS)),
    ("source/prepare.rs", "ask", 1, InPlan(READ_ONLY)),
    ("source/prepare.rs", "ask_if", 1, InPlan(READ_ONLY)),
    (
        "source/tracking.rs",
        "begin",
        2,
        Passes("of `guests track-writes`, not of a move"),
    ),
    ("source/tracking.rs", "refuse_tracked", 1, InPlan(SOURCE)),
    ("status/failure.rs", "attach", 1, Passes("of `attach`")),
    (
        "status/failure.rs",
        "no_arbiter",
        1,
        Later("the arbiter went since the plan, or gave the generation away"),
    ),
    (
        "status/failure.rs",
        "refused",
        4,
        Passes("of the destination"),
    ),
    ("status/hooks.rs", "hook_checks", 1, InPlan(LACKING)),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_counted_by_function() {
        let text = "
            pub(crate) fn first(a: u8) -> Result<(), Refusal> {
                // refused(\"a comment\")
                if a > 1 { return Err(refused(\"too many\")); }
                code: RefusalCode::Busy,
            }
            fn refused(text: &str) -> Refusal {
                other_refused(text)
            }
            #[cfg(test)]
            mod tests { fn test() { refused(1) } }
        ";
        assert_eq!(sites(text), [("first".to_owned(), 2)].into());
        let known = LIST[0].0;
        let findings = findings(known, text);
        assert!(
            findings
                .iter()
                .any(|one| one.contains("`first` refuses and is not listed"))
        );
        assert!(
            findings
                .iter()
                .any(|one| one.contains("is listed and refuses nothing"))
        );
    }
}

//! Formats a guest that runs at the destination while the missing blocks of its disks and its
//! memory are fetched, for both ends.

use super::figure;
use crate::cli::paint::{Line, Tone, wrap};
use longhaul_api::{Migration, Phase, Progress, RegionProgress, Side};
use longhaul_protocol::BLOCK_SIZE;
use longhaul_protocol::units::show_bytes;

const INDENT: &str = "  ";

fn disks(progress: &Progress) -> impl Iterator<Item = &RegionProgress> {
    progress.regions.iter().filter(|region| region.disk)
}

/// Returns whether missing blocks of a guest are being fetched.
fn is_under_way(migration: &Migration, progress: &Progress) -> bool {
    let mut regions = progress.regions.iter();
    let left = regions.any(|it| it.blocks_pending > 0 || it.unreadable_byte.is_some());
    let something = left || progress.trouble.is_some();
    migration.outcome.is_none() && migration.phase == Phase::Finishing && something
}

/// Returns the missing blocks, if there are any, for display below the list of migrations.
pub(crate) fn block(migration: &Migration, width: usize) -> Vec<Line> {
    let Some(progress) = &migration.progress else {
        return Vec::new();
    };
    if !is_under_way(migration, progress) {
        return Vec::new();
    }
    let Migration { guest, source, .. } = migration;
    let destination = &migration.destination;
    let left = left(progress);
    let (what, other) = match migration.side {
        Side::Destination => (
            format!(" runs here; {left} yet to come from {source}, which is needed until then"),
            source,
        ),
        Side::Source => (
            format!(" runs on {destination}; {left} only here yet: this host is needed until then"),
            destination,
        ),
    };
    let mut lines = vec![
        Line::default()
            .tone(Tone::Strong, guest.clone())
            .plain(what),
    ];
    let mut say = |text: String, tone: Tone| {
        let room = width.saturating_sub(INDENT.len()).max(20);
        let pieces = wrap(&text, room).into_iter();
        lines.extend(pieces.map(|piece| Line::text(INDENT).tone(tone, piece)));
    };
    let waiting = progress.regions.iter().filter_map(|region| region.waiting);
    match waiting.sum::<u64>() {
        0 => {}
        1 => say(
            "1 request of the guest waits for that".to_owned(),
            Tone::Warn,
        ),
        count => say(
            format!("{count} requests of the guest wait for that"),
            Tone::Warn,
        ),
    }
    if let Some(silent_ms) = progress.link.interrupted_ms {
        let silent = figure::ms(Some(silent_ms / 1000 * 1000));
        let waits = "the guest waits only for missing blocks, and continues by itself";
        say(
            format!("nothing heard from {other} for {silent}: {waits}"),
            Tone::Warn,
        );
    }
    if let Some(trouble) = &progress.trouble {
        say(trouble.clone(), Tone::Bad);
    }
    for text in unreadable(migration, progress) {
        say(text, Tone::Bad);
    }
    lines
}

/// Returns the memory and each disk with missing blocks.
fn left(progress: &Progress) -> String {
    let bytes = |blocks: u64| show_bytes(blocks.saturating_mul(BLOCK_SIZE as u64));
    let memory = progress.regions.iter().filter(|region| !region.disk);
    let memory: u64 = memory.map(|region| region.blocks_pending).sum();
    let memory = (memory > 0).then(|| format!("{} of its memory", bytes(memory)));
    let left = disks(progress).filter(|disk| disk.blocks_pending > 0);
    let left = left.map(|disk| {
        let how = disk
            .strategy
            .map_or_else(String::new, |how| format!(" ({how})"));
        format!("{} of {}{how}", bytes(disk.blocks_pending), disk.name)
    });
    let parts: Vec<String> = memory.into_iter().chain(left).collect();
    match parts.as_slice() {
        [] => "something is".to_owned(),
        parts => format!("{} are", parts.join(", ")),
    }
}

/// Returns the parts of the disks that the source cannot read.
pub(crate) fn unreadable(migration: &Migration, progress: &Progress) -> Vec<String> {
    let Migration { guest, source, .. } = migration;
    let text = |disk: &RegionProgress| {
        let byte = disk.unreadable_byte?;
        Some(format!(
            "{source} cannot read its disk {} at byte {byte}: what needs that fails in {guest}, \
             until it writes over it; the move ends when it has, or when {source} can read it \
             again",
            disk.name
        ))
    };
    disks(progress).filter_map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;
    use crate::cli::paint::golden;

    #[test]
    fn what_is_yet_to_come_is_said_at_both_ends() {
        let mut migration = sample::fetching();
        let mut lines = block(&migration, 100);
        migration.side = Side::Source;
        let progress = migration.progress.as_mut().unwrap();
        progress.link.interrupted_ms = Some(12_300);
        progress.trouble = None;
        let disk = progress.regions.last_mut().unwrap();
        (disk.waiting, disk.unreadable_byte) = (None, Some(1_052_672));
        lines.push(Line::default());
        lines.extend(block(&migration, 100));
        golden::check_lines("fetching", &lines, 100);
        migration.outcome = Some(longhaul_api::Outcome::Completed);
        assert!(block(&migration, 100).is_empty());
    }
}

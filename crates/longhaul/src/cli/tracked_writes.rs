//! Implements `guests track-writes`.

use crate::cli::error::CliError;
use crate::cli::output::Output;
use crate::cli::paint::{Line, Tone};
use crate::cli::show::figure;
use crate::cli::{done, now_unix_ms, show};
use longhaul_api::{Client, TrackedDisk, TrackedWrites, Tracking};
use longhaul_protocol::units::show_bytes;
use serde_json::json;

/// Begins, shows or stops the tracking of a guest's writes.
pub(crate) async fn run(
    client: &Client,
    output: &Output,
    name: &str,
    (shows, stops): (bool, bool),
) -> Result<(), CliError> {
    if stops {
        client.stop_tracking(name).await?;
        return show(output, &json!({ "stopped": name }), || {
            done(format!("the writes of {name} are tracked no longer"))
        });
    }
    if shows {
        let tracked = client.tracked_writes(name).await?;
        return show(output, &tracked, || lines(&tracked, now_unix_ms()));
    }
    let tracked = client.track_writes(name).await?;
    show(output, &tracked, || {
        let disks: Vec<&str> = tracked.disks.iter().map(|one| one.disk.as_str()).collect();
        done(format!(
            "the writes of {name} to {} are tracked",
            disks.join(", ")
        ))
    })
}

fn lines(tracked: &TrackedWrites, now_unix_ms: u64) -> Vec<Line> {
    if tracked.disks.is_empty() {
        let text = format!("the writes of {} are not tracked", tracked.guest);
        return vec![Line::text(text)];
    }
    let disks = tracked.disks.iter();
    disks.map(|disk| line(disk, now_unix_ms)).collect()
}

fn line(disk: &TrackedDisk, now_unix_ms: u64) -> Line {
    let changed = format!(
        "{}: {} of {} may have changed in {}",
        disk.disk,
        show_bytes(disk.changed_bytes),
        show_bytes(disk.image_bytes),
        figure::age(disk.since_unix_ms, now_unix_ms),
    );
    let line = Line::text(changed);
    match disk.tracking {
        Tracking::Ongoing => line,
        Tracking::Ended => line.plain("; tracking has ended with its QEMU"),
        Tracking::Lost => line.tone(
            Tone::Bad,
            "; its QEMU was started again, and writes without being tracked",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changed_is_said_with_what_is_not_known() {
        let disk = |tracking| TrackedDisk {
            disk: "vda".to_owned(),
            tracking,
            since_unix_ms: 0,
            image_bytes: 20 << 30,
            changed_bytes: 3 << 20,
        };
        let said = |disks| {
            let guest = "web-7".to_owned();
            let lines = lines(&TrackedWrites { guest, disks }, 3 * 3_600_000);
            let lines = lines.iter().map(|line| line.render(usize::MAX, false));
            lines.collect::<Vec<_>>().join("\n")
        };
        assert_eq!(said(Vec::new()), "the writes of web-7 are not tracked");
        let ongoing = said(vec![disk(Tracking::Ongoing)]);
        assert!(ongoing.starts_with("vda: 3"), "{ongoing}");
        assert!(!ongoing.contains("QEMU"), "{ongoing}");
        let all = said([Tracking::Ended, Tracking::Lost].map(disk).to_vec());
        assert!(
            all.contains("has ended") && all.contains("without being tracked"),
            "{all}"
        );
    }
}

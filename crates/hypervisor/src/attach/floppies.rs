//! Describes the floppy drives of the board, and what is in them.

use super::describe::Describing;
use super::found::Medium;
use super::options::shown;
use crate::hardware::more::{FLOPPIES, NO_FLOPPY};
use longhaul_protocol::guest::Disk;
use std::collections::BTreeMap;

impl Describing<'_> {
    /// Adds the floppy drives of the board to the settings, and their media to the disks.
    pub(super) fn floppies(&mut self, settings: &mut BTreeMap<String, String>) {
        let found = self.found;
        let of_board = |medium: &&Medium| medium.device.starts_with("/machine/unattached/");
        for (index, name) in FLOPPIES.iter().enumerate() {
            let drive = format!("floppy{index}");
            let mut media = found.media.iter().filter(of_board);
            let Some(medium) = media.find(|medium| medium.drive == drive) else {
                continue;
            };
            let Some(inserted) = &medium.inserted else {
                // The first drive is there anyway.
                if index > 0 {
                    settings.insert((*name).to_owned(), NO_FLOPPY.to_owned());
                }
                continue;
            };
            let what = format!("the floppy drive {drive}");
            if found.limits.has_own(&medium.device) || found.limits.any_of(&inserted.throttled_by) {
                self.refuse(
                    format!("{what} has limits, which cannot be set elsewhere"),
                    "take the limits of its drive away (QMP `block_set_io_throttle` with zeros)",
                );
            }
            if inserted.is_part {
                self.part(&what);
            }
            let image = self.names.image(&what, inserted);
            let Some(image) = self.accept(image) else {
                continue;
            };
            let is_local = self.names.is_local(&image);
            let called = format!("fd{index}");
            if is_local {
                self.backing_files(&what, &called, &inserted.backing);
            }
            self.disks.push(Disk {
                name: called.clone(),
                image,
                shared: !is_local,
                read_only: inserted.read_only,
            });
            settings.insert((*name).to_owned(), called);
        }
        settings.append(&mut self.settings);
        let is_known = |medium: &Medium| {
            let mut devices = found.devices.iter().map(|seen| seen.path.as_str());
            medium.drive == "floppy0"
                || medium.drive == "floppy1"
                || devices.any(|path| medium.device.starts_with(path))
        };
        let media = found.media.iter().filter(of_board);
        for medium in media.filter(|medium| medium.inserted.is_some() && !is_known(medium)) {
            self.refuse(
                format!(
                    "drive {} of the board: which one it is cannot be told",
                    shown(&medium.drive)
                ),
                "start the guest without `id` of this -drive",
            );
        }
    }
}

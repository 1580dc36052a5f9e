//! Describes the backing files of disks: each becomes a read-only disk that no device has.

use super::describe::Describing;
use super::found::Inserted;
use crate::disk::BASES;
use longhaul_protocol::guest::{BACKING, Disk};
use std::path::Path;

impl Describing<'_> {
    /// Adds the backing files of a disk, from the top down. A base image is found by the name in
    /// the image's header.
    pub(super) fn backing_files(&mut self, called: &str, disk: &str, files: &[Inserted]) {
        if let [file] = files
            && self.is_base_image(file)
        {
            return;
        }
        let mut above = disk.to_owned();
        for (number, file) in (1..).zip(files) {
            let what = match number {
                1 => format!("disk {called}: its backing file"),
                number => format!("disk {called}: its backing file {number}"),
            };
            if self.found.limits.any_of(&file.throttled_by) {
                self.refuse(
                    format!("{what} has limits of its own, which cannot be set elsewhere"),
                    "take the limits of that `throttle-group` away (`qom-set` of its `limits`)",
                );
            }
            if file.is_part {
                self.part(&what);
            }
            let image = self.names.image(&what, file);
            let Some(image) = self.accept(image) else {
                return;
            };
            let shared = !self.names.is_local(&image);
            let known = self.disks.iter().find(|known| known.image == image);
            let name = match known {
                Some(known) => known.name.clone(),
                None => {
                    let name = self.free_name();
                    self.disks.push(Disk {
                        name: name.clone(),
                        image,
                        shared,
                        read_only: true,
                    });
                    name
                }
            };
            self.settings
                .insert(format!("{BACKING}{above}"), name.clone());
            // Both hosts follow the headers of a shared image.
            if shared {
                return;
            }
            above = name;
        }
    }

    fn free_name(&self) -> String {
        let mut names = (0..).map(|number| format!("backing{number}"));
        let taken = |name: &String| self.disks.iter().any(|disk| disk.name == *name);
        names.find(|name| !taken(name)).unwrap_or_default()
    }

    /// Returns whether a file is one of this host's base images.
    fn is_base_image(&self, file: &Inserted) -> bool {
        let path = self.names.seen_by_it(&file.file);
        let bases = self.names.config.state.join(BASES).canonicalize();
        let folder = path.canonicalize();
        let folder = folder
            .ok()
            .and_then(|path| path.parent().map(Path::to_owned));
        folder.is_some() && folder == bases.ok()
    }
}

//! Moves a guest of the bench with Longhaul.

use super::LIMIT;
use super::guest::{ASKED_DOWNTIME_MS, Ground, Moved, Subject};
use super::picture::Picture;
use super::progress::Progress;
use super::row::Row;
use crate::bench::Options;
use crate::moves::{LonghaulMover, Show};
use longhaul_api::DiskChoice;
use longhaul_lab::error::{During, LabError};
use longhaul_lab::guest::disks::LocalDisk;
use longhaul_lab::guest::{CHANNEL_NAME, KernelFiles};
use longhaul_lab::history::task::Task;
use longhaul_lab::lab::{Host, Lab, say};
use longhaul_lab::product::{Product, Settings, channel_socket};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// The allowance of a command beyond the move itself.
const FINISH_LIMIT: Duration = Duration::from_secs(60);

/// Returns the image of a guest's disk, with a name of its own: a guest that was moved away is not
/// started again.
pub(super) fn image(number: usize) -> String {
    format!("disk-{number}")
}

/// Returns its path on a host.
pub(super) fn image_path(
    lab: &Lab,
    host: usize,
    number: usize,
    shared: bool,
) -> Result<PathBuf, LabError> {
    let folder = match shared {
        true => lab.shared_folder()?,
        false => lab.host(host)?.folder().to_owned(),
    };
    Ok(folder.join(format!("{}.raw", image(number))))
}

/// Starts agents with a configured image for each guest, whose disk moves by this strategy.
pub(super) fn start(
    lab: &mut Lab,
    files: &KernelFiles,
    options: &Options,
    strategies: &[DiskChoice],
) -> Result<Product, LabError> {
    let settings = Settings {
        qemus: vec![options.qemu.clone()],
        accelerator: "auto".to_owned(),
    };
    let tables = [images(lab, 0, strategies)?, images(lab, 1, strategies)?];
    let [first, second] = tables;
    Product::start_each_with(lab, files, &settings, |host| match host {
        0 => first.clone(),
        _ => second.clone(),
    })
}

/// Returns a host's configuration for the images of guests; some of them are shared by both hosts.
fn images(lab: &Lab, host: usize, strategies: &[DiskChoice]) -> Result<toml::Table, LabError> {
    let mut images = toml::Table::new();
    for (number, strategy) in strategies.iter().enumerate() {
        let path = image_path(lab, host, number, *strategy == DiskChoice::Shared)?;
        let table = toml::Table::from_iter([
            ("path".to_owned(), path.display().to_string().into()),
            ("format".to_owned(), "raw".into()),
            ("direct".to_owned(), true.into()),
        ]);
        images.insert(image(number), table.into());
    }
    let images = ("images".to_owned(), images.into());
    Ok(toml::Table::from_iter([images]))
}

impl Ground<'_> {
    /// Moves a guest whose disk moves by this strategy.
    pub(super) fn longhaul(
        &mut self,
        mut subject: Subject,
        task: &Task<'_>,
        strategy: DiskChoice,
    ) -> Result<(Row, Progress), LabError> {
        let name = subject.guest.name.clone();
        self.listen_to_product(&subject, 0)?;
        self.product()?.start_guest(self.lab, 0, &subject.guest)?;
        subject.begin(task)?;
        let before = self.picture(0, &name)?;
        subject.work()?;
        self.listen_to_product(&subject, 1)?;
        let downtime = format!("{ASKED_DOWNTIME_MS}ms");
        let words = ["--downtime", &downtime, "--disks", strategy.name()];
        let mover = LonghaulMover {
            lab: self.lab,
            product: self.product()?,
        };
        let (limit, row) = (LIMIT + FINISH_LIMIT, &mut subject.row.moved);
        let finished = mover.carry(&name, [0, 1], &words, limit, Show::Nothing, row)?;
        let host = usize::from(finished.completed());
        let moved = Moved {
            times: [finished.began, finished.ended],
            channel: channel_socket(self.lab.host(host)?, &name, CHANNEL_NAME),
            folder: match strategy {
                DiskChoice::Shared => self.lab.shared_folder()?,
                _ => self.lab.host(host)?.folder().to_owned(),
            },
        };
        let mut changes = None;
        let judged = subject.judge(&moved, || {
            if finished.completed() {
                let after = self.picture(1, &name)?;
                changes = Some(before.changes(&after));
            }
            self.product()?.stop_guest(host, &name)
        });
        self.remove_images(task.disks)?;
        let (mut row, progress) = judged?;
        for change in changes.iter().flatten() {
            say(&format!("the disk is not what it was: {change}"));
        }
        row.disk_changes = changes.map(|changes| changes.len() as u64);
        Ok((row, progress))
    }

    fn product(&self) -> Result<&Product, LabError> {
        let none = || LabError::Which("no agents were started".to_owned());
        self.product.as_ref().ok_or_else(none)
    }

    fn listen_to_product(&self, subject: &Subject, host: usize) -> Result<(), LabError> {
        let (host, name) = (self.lab.host(host)?, &subject.guest.name);
        let socket = |channel: &str| channel_socket(host, name, channel);
        subject.history.listen(socket)
    }

    /// Inspects a guest's QEMU from outside. QEMU's control socket serves one client at a time: the
    /// agent, which the guest does not need, is ended for a moment.
    fn picture(&mut self, host: usize, name: &str) -> Result<Picture, LabError> {
        let place: &Host = self.lab.host(host)?;
        let gone = || LabError::Which(format!("{} does not know {name}", place.name()));
        let pid = self.product()?.guest(host, name)?.and_then(|it| it.pid);
        let pid = pid.ok_or_else(gone)?;
        let socket = place.folder().join(format!("state/guests/{name}/run/qmp"));
        let product = self.product.as_mut().ok_or_else(gone)?;
        product.agent_mut(host)?.kill()?;
        let picture = Picture::take(&socket, pid, place.folder());
        product.agent_mut(host)?.restart(place)?;
        picture
    }

    /// Removes a guest's images: the next one has an image of its own.
    fn remove_images(&self, disks: &[LocalDisk]) -> Result<(), LabError> {
        for name in disks.iter().filter_map(|disk| disk.path.file_name()) {
            for folder in [
                self.lab.host(0)?.folder().to_owned(),
                self.lab.host(1)?.folder().to_owned(),
                self.lab.shared_folder()?,
            ] {
                let moved = format!("{}.moved", name.display());
                for path in [folder.join(name), folder.join(moved)] {
                    match fs::remove_file(&path) {
                        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                            return Err(error).during(|| format!("remove {}", path.display()));
                        }
                        _ => {}
                    }
                }
            }
        }
        Ok(())
    }
}

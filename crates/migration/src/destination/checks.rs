//! Checks of whether this host could run a guest.

use crate::context::Context;
use crate::disks::images::look_for_room;
use longhaul_hypervisor::capabilities::can_run;
use longhaul_hypervisor::config::RunsAsRoot;
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::machine::Machine;
use longhaul_protocol::message::{Answer, Check, Verdict};
use tokio::task::block_in_place;

impl Context {
    /// Returns all checks of whether this host could run a guest.
    pub(crate) async fn local_checks(
        &self,
        guest: &GuestDescription,
        machine: &Machine,
        without_disks: bool,
    ) -> Answer {
        let answer = self.checks_now(guest, machine, without_disks).await;
        let mut verdicts = answer.checks.iter().map(|check| check.verdict);
        let refused = verdicts.any(|verdict| verdict == Verdict::Refused);
        // Retained QEMUs of guests that left are no reason to refuse: they end, and the checks run
        // again.
        if refused && self.retained_qemus.make_way().await {
            return self.checks_now(guest, machine, without_disks).await;
        }
        answer
    }

    async fn checks_now(
        &self,
        guest: &GuestDescription,
        machine: &Machine,
        without_disks: bool,
    ) -> Answer {
        let host = self.parts.config.name.clone();
        let refused = |text: String, hint: Option<String>| Check {
            verdict: Verdict::Refused,
            text,
            hint,
        };
        let mut checks = match self.parts.prober.capabilities().await {
            Ok(capabilities) => can_run(&host, guest, Some(machine), &capabilities),
            Err(error) => vec![refused(format!("{host}: {error}"), None)],
        };
        if let Err(error) = self.parts.config.hypervisor.qemu.check_user() {
            let text = format!("{host} cannot run {}: {error}", guest.name);
            checks.push(refused(text, Some(RunsAsRoot::HINT.to_owned())));
        }
        let unshared = guest.disks.iter().find(|disk| disk.is_local());
        match longhaul_hypervisor::description::check(guest) {
            Err(error) => {
                let text = format!("{host} cannot run {}: {error}", guest.name);
                checks.push(refused(text, None));
            }
            Ok(()) if without_disks => {}
            Ok(()) => {
                let local = guest.disks.iter().filter(|disk| disk.is_local());
                let room = local.map(|disk| look_for_room(self, guest, &disk.name));
                let refusals = room.filter_map(Result::err);
                checks.extend(refusals.map(|refusal| refused(refusal.text, refusal.hint)));
            }
        }
        if let Some(disk) = unshared.filter(|_| without_disks) {
            checks.push(refused(
                format!(
                    "disk {} of {} is not on storage that both hosts see",
                    disk.name, guest.name
                ),
                Some(
                    "let it move with the guest (--disks auto), or put it on shared storage and \
                     write \
                     `shared = true` in its description"
                        .into(),
                ),
            ));
        }
        match block_in_place(|| self.parts.guests.list()) {
            Ok(found) if found.iter().any(|found| found.name() == guest.name) => {
                checks.push(refused(
                    format!("{host} has a guest called {} already", guest.name),
                    Some(format!(
                        "on {host}: longhaul guests, and stop or rename the one there"
                    )),
                ));
            }
            Ok(_) => {}
            Err(error) => {
                let text = format!("{host} cannot look for guests: {error}");
                checks.push(refused(text, None));
            }
        }
        checks.extend(self.hook_answers());
        Answer { host, checks }
    }
}
